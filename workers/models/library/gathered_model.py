"""A model of the transformers library that runs one sequence at a time, on KV gathered from pages.

It is for models with attention code of their own (bloom, falcon, mpt, gptj), which does not support pages,
and for those with recurrent layers or an index of keys. Their code gets a cache of the library's interface:
layers of attention copy keys and values from the pages, recurrent layers have a copy of a state. A step runs
at least one forward for each of its sequences, so sequences do not share a batch.

Dimension letters: T tokens of a forward; C positions of its sequence; K key-value heads; D width of a head; R
wanted rows; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from workers.kv.state_tensors import StateShape
from workers.kv.states import EMPTY, Held, StateRun
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.library.library_model import EAGER, LibraryModel
from workers.models.page_writes import PageWrites
from workers.models.self_check import tolerance

# The kinds of layers of the library's cache that are known: with keys and values, besides with the keys of an
# index that chooses positions, with a state, with keys and values and a state. They may keep a window of keys
# only; here all are kept, and the mask has the window.
_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
_INDEXED = (DynamicIndexedLayer,)
_RECURRENT = (LinearAttentionLayer,)
_BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
# The tokens of the check whether a forward of several goes on from a state.
_FIRST_TOKENS, _MORE_TOKENS = 5, 4
# A layer of the cache, and 0 for its keys and values, or 1 for those of its index, which has its own pages.
_Place = tuple[int, int]


class _Keys:
    """Where the layers of a cache find the keys and values of a sequence."""

    # The tokens that are there before the forward.
    length = 0

    def extend(
        self, place: _Place, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes new keys and values [1, K, T, D], and returns those of the whole sequence [1, K, C, D]."""
        raise NotImplementedError


class _PagedKeys(_Keys):
    """In the pages of one item of a step."""

    def __init__(
        self, inputs: ForwardInputs, kv: KvTensors, places: Mapping[_Place, int], item: int, rows: range
    ) -> None:
        """`rows`: of the item in the batch; `places`: the layer of `kv` of each place."""
        self._places = places
        end = inputs.attention.context_lens_host[item]
        self._kv = kv
        self._pages = inputs.attention.page_tables[item, : -(-end // kv.page_size)]
        self._slots = inputs.slots[rows.start : rows.stop]
        # The first position whose keys and values are not in the pages yet.
        self._first = end - len(rows)

    def advance(self, start: int, end: int) -> None:
        """The next forward is over these positions."""
        self.length = start
        self._end = end
        self._known = max(0, self._first - start)
        self._writes = PageWrites(self._slots[max(start, self._first) - self._first : end - self._first])

    def extend(
        self, place: _Place, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv, (k_pages, v_pages) = self._kv, self._kv.layer(self._places[place])
        keys, values = (new[0, :, self._known :].transpose(0, 1).to(kv.dtype) for new in (key, value))
        if len(keys):
            self._writes.write(keys.contiguous(), values.contiguous(), k_pages, v_pages)
        gathered = (
            half.data.index_select(0, self._pages).flatten(0, 1)[: self._end] for half in (k_pages, v_pages)
        )
        all_keys, all_values = (half.transpose(0, 1)[None] for half in gathered)  # [1, K, C, D]
        return all_keys.to(key.dtype), all_values.to(value.dtype)


class _ProbedKeys(_Keys):
    """Notes the shapes of a forward's keys and values, by their place."""

    def __init__(self) -> None:
        self.seen: dict[_Place, LayerKv] = {}

    def extend(
        self, place: _Place, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, of_index = place
        if place in self.seen or key.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ModelError(f"layer {layer} stores more than keys and values")
        self.seen[place] = LayerKv(key.shape[1], key.shape[3], value.shape[3], in_keys=bool(of_index))
        return key, value


class _Stored:
    """The part of a layer of the library's cache that is about keys and values, which it does not store."""

    keys_at: tuple[_Keys, int]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, layer = self.keys_at
        return keys.extend((layer, 0), key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        keys, layer = self.keys_at
        states = indexer_key_states[:, None]  # [1, 1, T, D]
        return keys.extend((layer, 1), states, states)[0][:, 0]

    def get_seq_length(self) -> int:
        return self.keys_at[0].length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys_at[0].length + query_length, 0


class _AttentionLayer(_Stored, DynamicLayer):  # type: ignore[no-untyped-call]
    pass


class _IndexedLayer(_Stored, DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    pass


class _BothLayer(_Stored, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,no-untyped-call,override]
    pass


class GatheredModel(LibraryModel):
    """A model that stores keys and values, an index of keys and recurrent states, in the library's cache."""

    # The model's own attention code does not support token trees, and wants plain keys and values.
    takes_trees = False
    packs_kv = False

    def __init__(self, module: PreTrainedModel, why_not_packed: str = "") -> None:
        """Take ownership of a loaded model, and run a few tokens to find what it stores.

        Raises:
            ModelError: A layer stores something else.
        """
        super().__init__(module)
        self.why_not_packed = why_not_packed
        self._set_attention(EAGER)
        self._cache_name = "past_key_values" if "past_key_values" in self._parameters else "cache_params"
        # By layer of the library's cache: its kind, and how many states of each kind it may have.
        self._kinds = [(type(layer), getattr(layer, "number_of_states", 0)) for layer in _layers_of(module)]
        # Where in the cache each tensor of a state is: the layer, the name of the attribute, and the index.
        self._state_places: tuple[tuple[int, str, int], ...] = ()
        # The layer of pages for each place in the cache.
        self._places: dict[_Place, int] = {}
        self.kv_layers = self._probe()
        # Whether a forward of several tokens may go on from a state.
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
        keys = _PagedKeys(inputs, kv, self._places, item, rows)
        cache = self._new_cache(keys)
        begin = run.source.position
        if run.source.slot != EMPTY:
            assert kv.states is not None
            self._put_state(cache, kv.states.load(run.source.slot))
        # The positions whose rows are wanted.
        asked = [row - rows.start + first for row in wanted if row in rows]
        for start, stop, slot in self._parts(run):
            keys.advance(start, stop)
            index = torch.tensor([place - start for place in asked if start <= place < stop]).long()
            answer = self._call(cache, tokens[start - begin : stop - begin], start, index, layers)
            logits: torch.Tensor = answer.logits[0]
            index = index.to(self.device)
            if len(index):
                states = {layer: answer.hidden_states[layer][0].index_select(0, index) for layer in layers}
                yield logits if self._takes_rows else logits.index_select(0, index), states
            if slot != EMPTY and kv.states is not None:
                kv.states.store(slot, self._state_of(cache))

    def _parts(self, run: StateRun) -> Iterator[tuple[int, int, int]]:
        """The forwards of an item: the first position, that after the last, and where the state goes."""
        start = run.source.position
        for held in run.writes:
            if start and not self._goes_on_at_once:
                for position in range(start, held.position - 1):
                    yield position, position + 1, EMPTY
                start = held.position - 1
            yield start, held.position, held.slot
            start = held.position

    def _call(
        self,
        cache: Cache,
        tokens: torch.Tensor,
        start: int,
        index: torch.Tensor,
        layers: tuple[int, ...] = (),
    ) -> Any:
        """Run the model's forward over tokens [T] from position `start` on, for the rows `index` [R]."""
        positions = torch.arange(start, start + len(tokens), device=self.device)
        return self.module(
            input_ids=tokens[None],
            use_cache=True,
            **{self._cache_name: cache},
            **({"position_ids": positions[None]} if self._takes_positions else {}),
            **({"logits_to_keep": index.to(self.device)} if self._takes_rows else {}),
            **({"output_hidden_states": True} if layers else {}),
        )

    def _new_cache(self, keys: _Keys) -> Cache:
        """A cache without states, whose keys and values are in `keys`."""
        layers: list[Any] = []
        for index, (kind, states) in enumerate(self._kinds):
            if kind is DummyLayer:
                layers.append(DummyLayer())  # type: ignore[no-untyped-call]
                continue
            if kind in _RECURRENT:
                layers.append(LinearAttentionLayer(states))
                continue
            layer: Any = _IndexedLayer if kind in _INDEXED else _AttentionLayer
            layer = _BothLayer(states) if kind in _BOTH else layer()
            layer.keys_at = keys, index
            layers.append(layer)
        return Cache(layers)

    def _put_state(self, cache: Cache, state: Sequence[torch.Tensor]) -> None:
        """Give the layers of a new cache a state, which they change."""
        for (index, name, number), tensor in zip(self._state_places, state, strict=True):
            layer: Any = cache.layers[index]
            getattr(layer, name)[number] = tensor
            getattr(layer, f"is_{name}_initialized")[number] = True
            layer.has_previous_state[number] = True
            if name == "conv_states":
                layer.conv_kernel_size[number] = tensor.shape[-1]
                layer.dtype, layer.device = tensor.dtype, tensor.device

    def _state_of(self, cache: Cache) -> list[torch.Tensor]:
        return [getattr(cache.layers[index], name)[number] for index, name, number in self._state_places]

    @torch.inference_mode()
    def _probe(self) -> tuple[LayerKv, ...]:
        """The shapes of the keys and values that a forward stores. Finds those of states.

        Raises ModelError.
        """
        keys = _ProbedKeys()
        cache, tokens = self._new_cache(keys), torch.zeros(2, dtype=torch.int64, device=self.device)
        self._call(cache, tokens, 0, torch.zeros(0, dtype=torch.int64))
        one = {"input_ids": tokens[None, :1], "use_cache": True}
        self.has_hidden_states = self._outputs_hidden_states(
            **one, **{self._cache_name: self._new_cache(_ProbedKeys())}
        )
        places, shapes, with_keys = list[tuple[int, str, int]](), list[StateShape](), 0
        for index, layer in enumerate(cache.layers):
            found = len(places)
            with_keys += isinstance(layer, _Stored)
            for name in ("conv_states", "recurrent_states"):
                for number, tensor in getattr(layer, name, {}).items():
                    if tensor is not None:
                        places.append((index, name, number))
                        shapes.append(StateShape(tuple(tensor.shape[1:]), tensor.dtype))
            if isinstance(layer, LinearAttentionLayer) and len(places) == found:
                raise ModelError(f"layer {index} of {self.name} keeps a state outside of the library's cache")
        if getattr(self.module, "_is_stateful", False) and not places:
            raise ModelError(f"{self.name} has a state that is not in the library's cache")
        seen = sum(not of_index for _, of_index in keys.seen)
        if seen != with_keys or not (places or with_keys):
            raise ModelError(f"{self.name} stores keys and values for {seen} of {with_keys} layers")
        self._state_places, self.state_shapes = tuple(places), tuple(shapes)
        self._places = {place: number for number, place in enumerate(sorted(keys.seen))}
        return tuple(keys.seen[place] for place in self._places)

    @torch.inference_mode()
    def _can_go_on(self) -> bool:
        """Whether a forward of several tokens goes on from a state; some families' code begins anew."""
        vocab_size = self.module.config.get_text_config(decoder=True).vocab_size
        tokens = torch.arange(_FIRST_TOKENS + _MORE_TOKENS, device=self.device) * 31 % vocab_size
        rows, logits = list[torch.Tensor](), torch.empty(0)
        for sizes in ((_FIRST_TOKENS, _MORE_TOKENS), (_FIRST_TOKENS, *[1] * _MORE_TOKENS)):
            cache = DynamicCache(config=self.module.config)
            for start, end in pairwise(accumulate(sizes, initial=0)):
                logits = self._call(cache, tokens[start:end], start, torch.tensor([end - start - 1])).logits
            rows.append(logits[0, -1].float())
        error = (rows[0] - rows[1]).norm() / rows[1].norm()
        return bool(error <= tolerance(self.dtype))


def keeps_more(module: PreTrainedModel) -> bool:
    """Whether a model keeps more of its tokens than keys and values."""
    if getattr(module, "_is_stateful", False):
        return True
    layers = DynamicCache(config=module.config).layers
    return any(isinstance(layer, LinearAttentionLayer | DynamicIndexedLayer) for layer in layers)


def _layers_of(module: PreTrainedModel) -> list[Any]:
    """The layers of the library's own cache for a model. Raises ModelError if one is of a kind not known."""
    layers: list[Any] = DynamicCache(config=module.config).layers
    for index, layer in enumerate(layers):
        if type(layer) not in (*_ATTENTION, *_INDEXED, *_RECURRENT, *_BOTH, DummyLayer):
            raise ModelError(f"layer {index} keeps a {type(layer).__name__}, which is not supported")
    return layers
