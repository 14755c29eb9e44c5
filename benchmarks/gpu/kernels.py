"""Single kernels: their calls, with the minimum bytes or FLOP of each.

Dimension letters: T tokens; N items; H query heads; K key-value heads; D head width; C hidden width;
I intermediate width; V vocabulary; R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch.nn import functional

from benchmarks.shapes import Shape
from kernels import few_rows
from kernels.attention_batch import AttentionBatch
from kernels.attention_scoring import Scoring
from kernels.cuda import (
    decode_attention,
    gated_activation,
    paged_attention,
    prefill_attention,
    rms_norm,
    rope_kv_write,
    sampling,
    sampling_threshold,
)
from kernels.cuda.attention_tiles import TileConfig
from kernels.experts import experts, route
from kernels.few_rows_tiles import MOST_ROWS, tiles_for
from kernels.gated_activation import Activation
from kernels.gpu_experts import GpuExperts
from kernels.gpu_weight import GpuWeight
from kernels.group_formats import FORMATS
from workers import device_sampling
from workers.outputs import DraftProbabilities, Sampling
from workers.sampling import Draft, SamplingRow

EPS = 1e-6
# The products of a layer. Before those of _NORMED is a norm; the others are added to the residual stream.
PLACES = ("qkv", "output", "gate_up", "down")
_NORMED = ("qkv", "gate_up")
QUANTISED = ("q8_0", "q4_k")
MXFP4 = "mxfp4"
PAGE_SIZE = 16
# Tiles of attention that may be faster than those in use, with bfloat16.
_TILES = {
    "decode": (
        TileConfig(block_m=16, tile=32, num_warps=4, num_stages=4),
        TileConfig(block_m=16, tile=64, num_warps=4, num_stages=4),
        TileConfig(block_m=16, tile=128, num_warps=4, num_stages=3),
        TileConfig(block_m=16, tile=128, num_warps=8, num_stages=3),
    ),
    "prefill": (
        TileConfig(block_m=64, tile=64, num_warps=4, num_stages=3),
        TileConfig(block_m=128, tile=64, num_warps=8, num_stages=2),
        TileConfig(block_m=128, tile=64, num_warps=8, num_stages=4),
        TileConfig(block_m=128, tile=128, num_warps=8, num_stages=2),
    ),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One launch, with its bytes or FLOP."""

    run: Callable[[], object]
    bytes_moved: int = 0
    flops: int = 0


def fill_quantised(weight: GpuWeight) -> None:
    """A few rows, again and again: to quantise all takes longer than all the rest."""
    outputs, inputs = weight.shape
    count = min(64, outputs)
    generator = torch.Generator().manual_seed(0)
    if weight.form.name == MXFP4:  # to which nothing is quantised: blocks of a scale, 2^-8, and 16 bytes
        blocks = torch.randint(256, (count, inputs // 32, 17), dtype=torch.uint8, generator=generator)
        blocks[:, :, 0] = 120
        weight.write_blocks(0, blocks.flatten(1))
    else:
        weight.write(0, torch.randn(count, inputs, generator=generator) * inputs**-0.5)
    weight.data.copy_(weight.data[:count].repeat(-(-outputs // count), 1)[:outputs])


@contextmanager
def attention_tiles(kernel: str, config: TileConfig) -> Iterator[None]:
    """Uses these tiles for "decode" or "prefill" attention within the context."""
    module = decode_attention if kernel == "decode" else prefill_attention
    with ExitStack() as stack:
        for place in (module, paged_attention) if kernel == "decode" else (module,):
            stack.enter_context(mock.patch.object(place, "config_for", return_value=config))
        # It does not know the configuration.
        module._variant.cache_clear()  # noqa: SLF001
        stack.callback(module._variant.cache_clear)  # noqa: SLF001
        yield


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Makes calls with the widths of a model. The plan names the methods and gives their sizes."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def rms_norm(self, tokens: int) -> Call:
        x, weight = self._random(tokens, self.shape.hidden_size), self._random(self.shape.hidden_size)
        return Call(lambda: rms_norm.rms_norm(x, weight, EPS), 2 * x.nbytes + weight.nbytes)

    def add_rms_norm(self, tokens: int) -> Call:
        x, residual = (self._random(tokens, self.shape.hidden_size) for _ in range(2))
        weight = self._random(self.shape.hidden_size)
        return Call(lambda: rms_norm.add_rms_norm(x, residual, weight, EPS), 4 * x.nbytes + weight.nbytes)

    def gated_activation(self, tokens: int) -> Call:
        gate_up = self._random(tokens, 2 * self.shape.intermediate_size)  # [T, 2 * I]
        return Call(lambda: gated_activation.gated_activation(gate_up, "silu"), gate_up.nbytes * 3 // 2)

    def rope_kv_write(self, tokens: int) -> Call:
        heads, kv_heads, width = self._heads()
        qkv = self._random(tokens, (heads + 2 * kv_heads) * width)  # [T, (H + 2 * K) * D]
        qk_norm = self._random(heads + kv_heads, width)
        cos_sin = torch.rand(tokens, width, device=self.device)  # [T, D]
        pages = -(-tokens // PAGE_SIZE)
        k_pages, v_pages = (self._random(pages, PAGE_SIZE, kv_heads, width) for _ in range(2))
        slots = torch.randperm(pages * PAGE_SIZE, device=self.device)[:tokens]  # [T]
        return Call(
            lambda: rope_kv_write.rope_kv_write(qkv, qk_norm, cos_sin, slots, k_pages, v_pages, EPS),
            2 * qkv.nbytes + qk_norm.nbytes + cos_sin.nbytes + slots.nbytes,
        )

    def decode_attention(self, batch: int, context: int, *longer: int) -> Call:
        """`longer`: contexts of further items, such as one of 32k beside many short ones."""
        contexts = [context] * batch + list(longer)
        _heads, kv_heads, width = self._heads()
        read = 2 * sum(contexts) * kv_heads * width * self.dtype.itemsize
        return Call(self._attention([1] * len(contexts), contexts), read)

    def prefill_attention(self, tokens: int, context: int) -> Call:
        # Causal attention; scores and sums are two products.
        pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
        heads, _kv_heads, width = self._heads()
        return Call(self._attention([tokens], [context]), flops=4 * heads * width * pairs)

    def tiles_of(self, kernel: str) -> list[TileConfig]:
        """Those that are tried for "decode" or "prefill" attention; the first are in use."""
        width = self.shape.head_dim
        if kernel == "decode":
            used = decode_attention.config_for(self.dtype, width)
        else:
            shared_bytes = paged_attention.limits_of(self.device).shared_bytes
            used = prefill_attention.config_for(self.dtype, width, shared_bytes)
        others = _TILES[kernel] if self.dtype is torch.bfloat16 else [replace(used, num_warps=8)]
        return [used, *(config for config in others if config != used)]

    def product_alone(self, place: int, rows: int) -> Call:
        """The product of a place in a layer, of PLACES, by cuBLAS."""
        weight, x = self._place(place, rows)
        return Call(lambda: functional.linear(x, weight), weight.nbytes)

    def product_separate(self, place: int, rows: int) -> Call:
        """With the norm before it and the gate after it; the residual is added by the norm that follows."""
        weight, x = self._place(place, rows)
        scale, residual = self._random(x.shape[1]), x.clone()

        def run() -> None:
            normed = rms_norm.add_rms_norm(x, residual, scale, EPS) if PLACES[place] in _NORMED else x
            y = functional.linear(normed, weight)
            if PLACES[place] == "gate_up":
                gated_activation.gated_activation(y, "silu")

        return Call(run, weight.nbytes)

    def product_fused(self, place: int, rows: int, way: int) -> Call:
        """All in one, with the tiles of this number; see `kernels.few_rows`."""
        weight, x = self._place(place, rows)
        activation: Activation | None = "silu" if PLACES[place] == "gate_up" else None
        tiles = tiles_for(self.dtype, activation)[way]
        norm = residual = None
        if PLACES[place] in _NORMED:
            squares = torch.ones(64, MOST_ROWS, device=self.device)
            norm = few_rows.NormBefore(self._random(x.shape[1]), EPS, squares)
        else:
            residual = self._random(rows, len(weight))
        return Call(
            lambda: few_rows.few_rows_product(
                x, weight, None, tiles, norm=norm, activation=activation, residual=residual
            ),
            weight.nbytes,
        )

    def product_quantised(self, place: int, rows: int, form: int) -> Call:
        """The product alone, by a weight in a format with this number of QUANTISED."""
        weight, x = self._place(place, rows)
        form_name = QUANTISED[form] if x.shape[1] % 256 == 0 else "q8_0"
        quantised = GpuWeight(len(weight), x.shape[1], self.dtype, FORMATS[form_name], self._bytes)
        fill_quantised(quantised)
        return Call(lambda: quantised.multiply(x, None), quantised.nbytes)

    def experts_mxfp4(self, rows: int, count: int, chosen: int, hidden: int, inner: int) -> Call:
        """A layer of gpt-oss's experts, of which each row has so many that are chosen at random."""
        form = FORMATS[MXFP4]
        stacks = [
            GpuWeight(count * outputs, inputs, self.dtype, form, self._bytes)
            for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
        ]
        for stack in stacks:
            fill_quantised(stack)
        gate_up, down = (GpuExperts([stack], count) for stack in stacks)
        biases = self._random(count, 2 * inner), self._random(count, hidden)
        x, logits = self._random(rows, hidden), self._random(rows, count)
        ids, weights = route(logits, chosen, normalize=True)
        read = sum(stack.nbytes for stack in stacks) * len(set(ids.flatten().tolist())) // count
        return Call(lambda: experts(x, gate_up, down, ids, weights, "clamped_swiglu", biases=biases), read)

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _place(self, place: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight [O, I] of a place, and rows [T, I] for it."""
        heads, kv_heads, width = self._heads()
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        sizes = {
            "qkv": ((heads + 2 * kv_heads) * width, hidden),
            "output": (hidden, heads * width),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        weight = self._random(*sizes[PLACES[place]])
        return weight, self._random(rows, weight.shape[1])

    def choose_greedy(self, rows: int) -> Call:
        return self._choose(rows, 0.0)

    def choose_drawn(self, rows: int) -> Call:
        return self._choose(rows, 1.0)

    def choose_top_p(self, rows: int) -> Call:
        """The threshold of top_p, and the draw from what is left; without the copy of the rows before."""
        logits = torch.randn(rows, self.shape.vocab_size, device=self.device).mul_(3)  # [R, V] float32
        keys = torch.arange(rows, device=self.device)
        settings = torch.tensor([0.8, 0.9], dtype=torch.float64, device=self.device)
        temperatures, top_ps = settings.repeat(rows, 1).T.contiguous()
        top_ks, min_ps = torch.zeros(rows, dtype=torch.int32, device=self.device), torch.zeros_like(top_ps)
        ids, best, values = torch.empty_like(keys), *torch.empty(2, rows, device=self.device)
        threshold_ids = torch.empty_like(top_ks)

        def run() -> None:
            sampling_threshold.find_thresholds(
                logits, temperatures, top_ks, top_ps, min_ps, values, threshold_ids
            )
            sampling.choose(logits, temperatures, keys, ids, best, values, threshold_ids)

        return Call(run, logits.nbytes)

    def choose_penalties(self, rows: int) -> Call:
        """After 2,048 tokens each, with all that the host prepares and sends."""
        logits, dice = self._random(rows, self.shape.vocab_size), np.random.default_rng(0)
        spec = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
        histories = dice.integers(0, self.shape.vocab_size, (rows, 2048))
        settings = [SamplingRow(spec, position=2048, history=history) for history in histories]
        return Call(lambda: device_sampling.choose_tokens(logits, settings), logits.nbytes)

    def choose_drafts(self, rows: int) -> Call:
        """One draft each, from 64 tokens, with all that the host prepares and sends."""
        logits, dice = self._random(rows, self.shape.vocab_size), np.random.default_rng(0)
        settings = []
        for _ in range(rows):
            ids = np.sort(dice.choice(self.shape.vocab_size, 64, replace=False))
            draft = Draft([int(ids[0])], DraftProbabilities(ids, np.full(64, 1 / 64)))
            settings.append(SamplingRow(Sampling(temperature=0.8, top_p=0.9), draft=draft))
        keys = [(index, index + 1) for index in range(rows)]
        return Call(lambda: device_sampling.choose_with_drafts(logits, settings, keys), logits.nbytes)

    def _choose(self, rows: int, temperature: float) -> Call:
        logits = self._random(rows, self.shape.vocab_size)  # [R, V]
        keys = torch.arange(rows, device=self.device)
        ids, best = torch.empty_like(keys), torch.empty(rows, device=self.device)
        temperatures = torch.full((rows,), temperature, dtype=torch.float64, device=self.device)
        return Call(lambda: sampling.choose(logits, temperatures, keys, ids, best), logits.nbytes)

    def _attention(self, query_lens: list[int], contexts: list[int]) -> Callable[[], object]:
        """Over pages in random order, with page tables as wide as in the service."""
        heads, kv_heads, width = self._heads()
        items, pages = len(query_lens), [-(-context // PAGE_SIZE) for context in contexts]
        query = self._random(sum(query_lens), heads, width)  # [T, H, D]
        k_pages, v_pages = (self._random(sum(pages), PAGE_SIZE, kv_heads, width) for _ in range(2))
        longest = max(*pages, -(-self.shape.max_position_embeddings // PAGE_SIZE))
        tables = torch.zeros(items, longest, dtype=torch.int32, device=self.device)  # [N, P]
        shuffled = torch.randperm(sum(pages), device=self.device)
        for table, own in zip(tables, torch.split(shuffled, pages), strict=True):
            table[: len(own)] = own
        starts = [sum(query_lens[:item]) for item in range(items + 1)]
        batch = AttentionBatch(
            page_tables=tables,
            query_starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=self.device),
            query_lens=query_lens,
            context_lens_host=contexts,
        )
        return lambda: paged_attention.paged_attention(query, k_pages, v_pages, batch, Scoring(width**-0.5))

    def _heads(self) -> tuple[int, int, int]:
        """H, K, D."""
        return self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)
