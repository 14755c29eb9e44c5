"""A model of the transformers library that runs one sequence at a time, on KV gathered from pages.

For models whose own attention code (bloom, falcon, mpt, gptj) does not support pages, models that keep more
than keys and values, and models without a cache. Their code gets a cache with the library's interface; see
`library_cache`. A step runs at least one forward for each of its sequences, without batching.

Dimension letters: T tokens of a forward; C positions of its sequence; K key-value heads; D width of a head; R
wanted rows; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionLayer

from workers.kv.states import EMPTY, Held, StateRun
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.models.library.library_cache import Keys, LibraryCache, PagedKeys, Place, ProbedKeys
from workers.models.library.library_model import EAGER, LibraryModel
from workers.models.self_check import tolerance

# The numbers of tokens in the check whether a forward of several tokens continues from a state.
_FIRST_TOKENS, _MORE_TOKENS = 5, 4
# A model without a cache computes all tokens of a sequence in each forward. Pages store the token ids, as
# three digits each, which all dtypes can represent.
_TOKENS: Place = (0, "tokens")
_DIGITS = torch.tensor([1 << 16, 1 << 8, 1])


class GatheredModel(LibraryModel):
    """A model that keeps the state of a sequence in the library's cache, in its modules, or nowhere."""

    # The model's own attention code does not support token trees, and wants plain keys and values.
    takes_trees = False
    packs_kv = False

    def __init__(self, module: PreTrainedModel, why_not_packed: str = "") -> None:
        """Take ownership of a loaded model. Runs a few tokens to find what it stores.

        Raises ModelError if a layer stores something else.
        """
        super().__init__(module)
        self.why_not_packed = why_not_packed
        self._set_attention(EAGER)
        # The layer of pages for each place in the cache.
        self._places: dict[Place, int] = {}
        self._computes_all = False
        with torch.inference_mode():
            self._cache = LibraryCache(module, self._parameters)
            self.kv_layers = self._probe()
        # Whether a forward of several tokens may continue from a state.
        self._goes_on_at_once = not self.state_shapes or self._can_go_on()

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        wanted = inputs.wanted_rows.tolist()
        starts = list(accumulate(inputs.attention.query_lens, initial=0))
        found: list[torch.Tensor] = []
        # By layer: the hidden states of the wanted rows, in the order of the batch.
        states: dict[int, list[torch.Tensor]] = {
            layer: [] for layer in (() if capture is None else capture.rows)
        }
        for item, (begin, end) in enumerate(pairwise(starts)):
            for logits, left in self._run(inputs, kv, item, range(begin, end), wanted, tuple(states)):
                found.append(logits)
                for layer, of_layer in left.items():
                    states[layer].append(of_layer)
        if capture is not None:
            for layer, rows_of_layer in states.items():
                capture.capture_last(layer, torch.cat(rows_of_layer))
        if not wanted:
            vocab_size = self.module.config.get_text_config(decoder=True).vocab_size
            return torch.empty((0, vocab_size), dtype=self.dtype, device=self.device)
        return torch.cat(found)

    def _run(
        self,
        inputs: ForwardInputs,
        kv: KvTensors,
        item: int,
        rows: range,
        wanted: Sequence[int],
        layers: tuple[int, ...],
    ) -> Iterator[tuple[torch.Tensor, dict[int, torch.Tensor]]]:
        """Run one item, which is the `rows` of the batch, in as many forwards as it needs.

        Yields:
            For each forward the logits [R, V] of its wanted rows, and by layer of `layers` the hidden states
            of these, [R, hidden width].
        """
        if not rows:
            return
        end = inputs.attention.context_lens_host[item]
        first = end - len(rows)
        assert bool(inputs.states) == bool(self.state_shapes)
        run = inputs.states[item] if inputs.states else StateRun(Held(first, EMPTY), (), (Held(end, EMPTY),))
        tokens = inputs.token_ids[rows.start : rows.stop]
        if run.before:
            tokens = torch.cat([tokens.new_tensor(run.before), tokens])
        keys = PagedKeys(inputs, kv, self._places, item, rows)
        begin = run.source.position
        if run.source.slot == EMPTY:
            self._cache.start(keys)
        else:
            assert kv.states is not None
            self._cache.go_on(keys, [tensor[0] for tensor in kv.states.load(run.source.slot)])
        # The positions whose rows are wanted.
        asked = [row - rows.start + first for row in wanted if row in rows]
        for start, stop, slot in self._parts(run):
            keys.advance(start, stop)
            new, first_run = tokens[start - begin : stop - begin], start
            if self._computes_all:
                new, first_run = _all_tokens(keys, new, self.dtype), 0
            index = torch.tensor([place - first_run for place in asked if start <= place < stop]).long()
            answer = self._call(new, first_run, index, layers)
            logits: torch.Tensor = answer.logits[0]
            index = index.to(self.device)
            if len(index):
                states = {layer: answer.hidden_states[layer][0].index_select(0, index) for layer in layers}
                yield logits if self._takes_rows else logits.index_select(0, index), states
            if slot != EMPTY and kv.states is not None:
                kv.states.store(slot, [tensor[None] for tensor in self._cache.state()])

    def _parts(self, run: StateRun) -> Iterator[tuple[int, int, int]]:
        """The forwards of an item: (first position, end position, slot for the state)."""
        start = run.source.position
        for held in run.writes:
            if start and not self._goes_on_at_once:
                for position in range(start, held.position - 1):
                    yield position, position + 1, EMPTY
                start = held.position - 1
            yield start, held.position, held.slot
            start = held.position

    def _call(
        self, tokens: torch.Tensor, start: int, index: torch.Tensor, layers: tuple[int, ...] = ()
    ) -> Any:
        """Run the model's forward over tokens [T] from position `start` on, for the rows `index` [R]."""
        positions = torch.arange(start, start + len(tokens), device=self.device)
        answer = self.module(
            input_ids=tokens[None],
            **({} if self._computes_all else {"use_cache": True, **self._cache.arguments}),
            **({"position_ids": positions[None]} if self._takes_positions else {}),
            **({"logits_to_keep": index.to(self.device)} if self._takes_rows else {}),
            **({"output_hidden_states": True} if layers else {}),
        )
        self._cache.ran(answer)
        return answer

    def _probe(self) -> tuple[LayerKv, ...]:
        """The shapes of the keys and values that a forward stores. Also finds those of states.

        Raises ModelError.
        """
        tokens, none = torch.zeros(2, dtype=torch.int64, device=self.device), torch.zeros(0).long()
        self._cache.start(ProbedKeys())
        self.has_hidden_states = self._outputs_hidden_states(
            input_ids=tokens[None, :1], use_cache=True, **self._cache.arguments
        )
        keys = ProbedKeys()
        self._cache.start(keys)
        self._call(tokens, 0, none)
        shapes = [tensor.shape for tensor in self._cache.state()]
        keys.length = len(tokens)
        self._call(tokens[:1], len(tokens), none)
        self.state_shapes = self._cache.probed(shapes)
        seen = keys.seen
        if not seen and not self.state_shapes:
            self._computes_all = True
            seen = {_TOKENS: LayerKv(1, len(_DIGITS), len(_DIGITS), in_keys=True)}
        self._places = {place: number for number, place in enumerate(sorted(seen))}
        return tuple(seen[place] for place in self._places)

    @torch.inference_mode()
    def _can_go_on(self) -> bool:
        """Whether a forward of several tokens continues from a state. Some families' code starts anew."""
        vocab_size = self.module.config.get_text_config(decoder=True).vocab_size
        tokens = torch.arange(_FIRST_TOKENS + _MORE_TOKENS, device=self.device) * 31 % vocab_size
        ends = list[list[torch.Tensor]]()
        for sizes in ((_FIRST_TOKENS, _MORE_TOKENS), (_FIRST_TOKENS, *[1] * _MORE_TOKENS)):
            keys, logits = ProbedKeys(), torch.empty(0)
            self._cache.start(keys)
            for start, end in pairwise(accumulate(sizes, initial=0)):
                keys.length = start
                logits = self._call(tokens[start:end], start, torch.tensor([end - start - 1])).logits
            # A lost state may change logits by less than rounding, but not the states after it. The first
            # state of a kind has been rounded least.
            states = {(one.shape, one.dtype): one for one in reversed(self._cache.state())}
            ends.append([one.to(torch.float32, copy=True) for one in (logits[0, -1], *states.values())])
        return all(
            bool((at_once - one_by_one).norm() <= tolerance(self.dtype) * one_by_one.norm())
            for at_once, one_by_one in zip(*ends, strict=True)
        )


def _all_tokens(keys: Keys, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tokens of a sequence [C] after those of a forward [T]."""
    digits = tokens[:, None] // _DIGITS.to(tokens.device) % 256  # [T, 3]
    rows = digits.to(dtype)[None, None]  # [1, 1, T, 3]
    every = keys.extend(_TOKENS, rows, rows)[0][0, 0]  # [C, 3]
    return (every.long() * _DIGITS.to(tokens.device)).sum(-1)


def keeps_more(module: PreTrainedModel) -> bool:
    """Whether a model keeps more of its tokens than keys and values."""
    if getattr(module, "_is_stateful", False):
        return True
    layers = DynamicCache(config=module.config).layers
    return any(isinstance(layer, LinearAttentionLayer | DynamicIndexedLayer) for layer in layers)
