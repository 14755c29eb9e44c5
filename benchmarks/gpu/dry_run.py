"""Which kernels a model of a config launches on a GPU, found without one: a dry run on tensors without data.

Launches are recorded instead of carried out, and tensors are on the device "meta". This changes what all
tensors say meanwhile, so it runs in a process of its own: see `benchmarks.gpu.precompile`. Two layers of each
kind stand for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.launches import Device, Launch, as_on, recording
from kernels.cuda import (
    advance,
    sampling,
    sampling_adjust,
    sampling_drafts,
    sampling_filters,
    sampling_weight,
)
from kernels.cuda.experts import FEW_PAIRS
from kernels.few_rows_tiles import Tiles
from workers.device_sampling import NEUTRAL_FILTERS
from workers.kv.states import EMPTY, FROM_START, Held, StateRun
from workers.kv.tensors import KvTensors
from workers.models.active_kernels import check_cuda_kernels
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.few_rows import Place, TilesOfPlaces
from workers.models.inputs import MAX_TREE_TOKENS, AttentionBatch, ForwardInputs, TokenTrees
from workers.models.model import new_pages
from workers.models.parameters import FormatOf
from workers.runners.adjusted_rows import AdjustedRows
from workers.runners.cuda_graph import buckets_up_to, choose_again
from workers.runners.decode_buffers import DecodeBuffers

# Enough for the texts of a dry run.
_PAGES = 64
# Of a table for the longest of the prompts below.
_LEAST_PAGES = 8
# Prompts of numbers of tokens for which kernels are specialised: a multiple of 16, and others.
_PROMPTS = (64, 65, 2, 1)


@dataclass(frozen=True, slots=True)
class Steps:
    """The sizes of a worker's steps, and its adapters.

    Attributes:
        max_rows: The most rows of a decode step that is captured.
        max_pages: The pages of the longest sequence.
        batch_invariant: With the kernels for that.
        lora: Slots for adapters, and their largest rank; None: there are none.
    """

    max_rows: int
    max_pages: int
    batch_invariant: bool = False
    lora: tuple[int, int] | None = None


def launches_of(
    config: ModelConfig,
    dtype: torch.dtype,
    steps: Steps,
    device: Device,
    formats: FormatOf | None = None,
) -> set[Launch]:
    """All that a worker with a model of this config launches, whatever it is asked for.

    `formats`: how matrices are quantised; see `build_decoder`. Raises UnsupportedError if there are no GPU
    kernels for its heads.
    """
    check_cuda_kernels(config)
    with as_on(device), recording() as found:
        decoder = build_decoder(few_layers(config), dtype, "meta", formats=formats)
        decoder.batch_invariant = steps.batch_invariant
        kv = new_pages(decoder, _PAGES)
        # As a worker measures which tiles are the fastest. Here it is none.
        decoder.fuse_few_rows(TilesOfPlaces(_run_once))
        _run_steps(decoder, kv, steps, lora=False)
        _run_with_each_tiles(decoder, kv, steps)
        if steps.lora is not None:
            decoder.allocate_lora(*steps.lora)
            _run_steps(decoder, kv, steps, lora=True)
        _choose_in_graph(config.vocab_size, dtype, steps.max_rows)
        _choose_tokens(config.vocab_size, dtype, steps.max_rows)
    return found


def _run_once(run: Callable[[], None]) -> float:
    run()
    return 1.0


class _Chosen(TilesOfPlaces):
    """Those with a number, without measuring. `most`: how many a place has that was asked for."""

    def __init__(self, number: int) -> None:
        super().__init__(_run_once)
        self._number = number
        self.most = 0

    def choose(self, place: Place, rows: int) -> Tiles | None:  # noqa: ARG002 - as in the base class
        tiles = place.tiles
        self.most = max(self.most, len(tiles))
        return tiles[self._number % len(tiles)] if tiles else None


def _run_with_each_tiles(decoder: Decoder, kv: KvTensors, steps: Steps) -> None:
    """Decodes in graphs, in which each place has its first tiles, then its next, until all have had all."""
    buffers = DecodeBuffers(buckets_up_to(steps.max_rows)[-1], steps.max_pages, torch.device("meta"))
    number = most = 0
    while number <= most:
        chosen = _Chosen(number)
        decoder.fuse_few_rows(chosen)
        for bucket in buckets_up_to(steps.max_rows):
            decoder.logits(decoder.forward(buffers.inputs(bucket, lora=False), kv))
        number, most = number + 1, chosen.most - 1


def few_layers(config: ModelConfig) -> ModelConfig:
    """The config with each kind of layer once or twice, and its last one at the end."""
    layers = config.layers
    kinds = [layer for index, layer in enumerate(layers) if layer not in layers[:index]]
    few = (*kinds, *kinds, layers[-1])
    return dataclasses.replace(config, num_hidden_layers=len(few), layers=few)


def _run_steps(decoder: Decoder, kv: KvTensors, steps: Steps, *, lora: bool) -> None:
    """Decodes of each size, prompts, both together, and token trees."""
    _run_decodes(decoder, kv, steps, lora=lora)
    batches = [([tokens], False) for tokens in _PROMPTS]
    batches += [([1, tokens], False) for tokens in _PROMPTS] + [([1] * 16 + [48], False)]
    batches += [([1, 5], True), ([5], True)] if decoder.takes_trees else []
    for lengths, has_trees in batches:
        # Tables are as wide as the longest text of a step: with short ones attention is not split.
        for pages in (_LEAST_PAGES, max(steps.max_pages, _LEAST_PAGES)):
            inputs = _inputs(lengths, pages, has_trees=has_trees, lora=lora)
            decoder.logits(decoder.forward(inputs, kv))
    if (experts := decoder.config.experts) is not None:
        # Which have other tiles for many pairs of a token and an expert.
        many = FEW_PAIRS * experts.count // experts.per_token + 1
        inputs = _inputs([many], many // kv.page_size + 1, has_trees=False, lora=lora)
        decoder.logits(decoder.forward(inputs, kv))


def _run_decodes(decoder: Decoder, kv: KvTensors, steps: Steps, *, lora: bool) -> None:
    """Decodes of each size: of a graph, whose inputs are in the runner's buffers, and without one."""
    buffers = DecodeBuffers(buckets_up_to(steps.max_rows)[-1], steps.max_pages, torch.device("meta"))
    for bucket in buckets_up_to(steps.max_rows):
        inputs = buffers.inputs(bucket, lora=lora)
        without_graph = [
            _inputs([1] * bucket, pages, has_trees=False, lora=lora) for pages in (1, steps.max_pages)
        ]
        for each in (*without_graph, inputs):
            decoder.logits(decoder.forward(each, kv))
        batch = inputs.attention
        places = inputs.token_ids, inputs.positions, inputs.slots, batch.context_lens
        advance.advance(*places, buffers.chosen[:bucket], batch.page_tables, page_size=kv.page_size)


def _integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _inputs(lengths: Sequence[int], pages: int, *, has_trees: bool, lora: bool) -> ForwardInputs:
    """A forward of items of so many tokens, of which the last is a tree, if any is. All rows are wanted."""
    tokens, items = sum(lengths), len(lengths)
    trees = None
    if has_trees:
        is_tree = [False] * (items - 1) + [True]
        roots, depths = (
            _integers(*shape, dtype=torch.int32) for shape in ((items,), (items, MAX_TREE_TOKENS))
        )
        trees = TokenTrees(roots, _integers(tokens), depths, is_tree)
    return ForwardInputs(
        token_ids=_integers(tokens),
        positions=_integers(tokens),
        slots=_integers(tokens),
        wanted_rows=_integers(tokens),
        attention=AttentionBatch(
            page_tables=_integers(items, pages, dtype=torch.int32),
            query_starts=_integers(items + 1, dtype=torch.int32),
            context_lens=_integers(items, dtype=torch.int32),
            query_lens=list(lengths),
            context_lens_host=list(lengths),
            trees=trees,
        ),
        lora_slots=_integers(tokens, dtype=torch.int32) if lora else None,
        states=[StateRun(FROM_START, (), (Held(count, EMPTY),)) for count in lengths],
    )


def _choose_in_graph(vocab_size: int, dtype: torch.dtype, max_rows: int) -> None:
    """The choice of tokens in the graphs of decode steps, whose settings are in the runner's buffers."""
    most, meta = buckets_up_to(max_rows)[-1], torch.device("meta")
    buffers = DecodeBuffers(most, 1, meta)
    adjusted = AdjustedRows(most, vocab_size, meta, buffers.queue)
    logits = buffers.keep_logits(_logits(most, vocab_size, dtype))
    for bucket in buckets_up_to(max_rows):
        chosen, best = buffers.chosen[:bucket], buffers.best[:bucket]
        sampling.choose(_logits(bucket, vocab_size, dtype), *buffers.draws(bucket), chosen, best)
        choose_again(adjusted, bucket, buffers, logits)


def _choose_tokens(vocab_size: int, dtype: torch.dtype, max_rows: int) -> None:
    """The choice of tokens with all settings, and what is told of it: see `workers.device_sampling`."""
    for rows in {1, max_rows}:
        temperatures, told = (_reals(rows) for _ in range(2))
        keys, chosen, tokens = (_integers(rows) for _ in range(3))
        best = _reals(rows, dtype=torch.float32)
        where = _integers(rows, dtype=torch.int32)
        sampling.choose(_logits(rows, vocab_size, dtype), temperatures, keys, chosen, best)
        copy = _logits(rows, vocab_size, torch.float32)
        sampling_adjust.apply_masks(copy, where, _integers(rows, -(-vocab_size // 32), dtype=torch.int32))
        sampling_adjust.apply_biases(copy, where, where, temperatures)
        counts = _integers(rows, vocab_size, dtype=torch.int32)
        sampling_adjust.count_histories(counts, _integers(5, dtype=torch.int32), keys, keys, keys)
        sampling_adjust.apply_penalties(copy, keys, counts, *[temperatures] * 3)
        filters = {name: _like(neutral, rows) for name, neutral in NEUTRAL_FILTERS.items()}
        found = sampling_filters.apply_filters(copy, temperatures, **filters)
        drawn_from = _reals(rows, vocab_size)
        without: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        for thresholds in (without, found):
            sampling.choose(copy, temperatures, keys, chosen, best, *thresholds)
            sampling_weight.log_probabilities(copy, temperatures, tokens, told, *thresholds)
            sampling_drafts.keep_or_draw(
                copy,
                temperatures,
                *thresholds,
                drawn_from,
                tokens,
                _integers(rows + 1),
                2,
                keys,
                keys,
                chosen,
            )


def _reals(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _like(neutral: np.generic, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.full(rows, neutral)).to("meta")


def _logits(rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, vocab_size, dtype=dtype, device="meta")
