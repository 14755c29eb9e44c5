"""The cache of a model of the library that runs one sequence at a time.

The model gets a cache of the class that the library makes for it. Data that grows with each token (keys and
values, keys of an index, rows to be compressed) is not stored there but in pages, or in a probe. All other
tensors that a forward leaves in the cache or in attributes of modules are the recurrent state.

Dimension letters: T tokens of a forward; C positions of its sequence; K key-value heads; D width of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicSlidingWindowLayer

from workers.kv.state_tensors import StateShape
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.page_writes import PageWrites

# (layer of the cache, name of the rows that it keeps for each token). KEYS: its keys and values.
Place = tuple[int, str]
KEYS = ""
# The names of the argument for the cache in models' forwards.
_ARGUMENTS = ("past_key_values", "cache_params", "state")


class Keys:
    """The keys and values of a sequence, which a cache reads and extends."""

    # The number of tokens before the forward.
    length = 0

    def extend(
        self, place: Place, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values [1, K, T, D]. Returns those of the whole sequence [1, K, C, D]."""
        raise NotImplementedError


class PagedKeys(Keys):
    """Keys and values in the pages of one item of a step."""

    def __init__(
        self, inputs: ForwardInputs, kv: KvTensors, places: Mapping[Place, int], item: int, rows: range
    ) -> None:
        """`rows`: the item's rows in the batch; `places`: the layer of `kv` for each place."""
        self._places = places
        end = inputs.attention.context_lens_host[item]
        self._kv = kv
        self._pages = inputs.attention.page_tables[item, : -(-end // kv.page_size)]
        self._slots = inputs.slots[rows.start : rows.stop]
        # The first position whose keys and values are not in the pages yet.
        self._first = end - len(rows)

    def advance(self, start: int, end: int) -> None:
        """Sets the positions of the next forward."""
        self.length = start
        self._end = end
        self._known = max(0, self._first - start)
        self._writes = PageWrites(self._slots[max(start, self._first) - self._first : end - self._first])

    def extend(
        self, place: Place, key: torch.Tensor, value: torch.Tensor
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


class ProbedKeys(Keys):
    """Keys and values in memory. Records their shapes by place."""

    def __init__(self) -> None:
        self.seen: dict[Place, LayerKv] = {}
        self._kept: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(
        self, place: Place, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self._kept.get(place)
        stored = 0 if before is None else before[0].shape[2]
        if stored != self.length or key.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ModelError(f"layer {place[0]} stores more than a key and a value of each token")
        self.seen[place] = LayerKv(key.shape[1], key.shape[3], value.shape[3], in_keys=value is key)
        if before is not None:
            key, value = (torch.cat(halves, dim=2) for halves in zip(before, (key, value), strict=True))
        self._kept[place] = key, value
        return key, value


class _StoredKeys:
    """The methods of the library's cache for keys and values, without storing them."""

    keys: Keys

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.extend((layer_idx, KEYS), key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        states = indexer_key_states[:, None]  # [1, 1, T, D]
        return self.keys.extend((layer_idx, "index"), states, states)[0][:, 0]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.keys.length

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return self.keys.length + query_length, 0


class _IndexedLayer(DynamicIndexedLayer):
    """Computes the positions of the index's keys, if the model stores them: they count from 0."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """[N, 1, C], of N dimensions of positions."""
        if self._stored is None or not self._cache.keys.length:
            return None
        dimensions, device = self._stored
        return torch.arange(self._cache.keys.length, device=device).expand(dimensions, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        self._stored = None if positions is None else (len(positions), positions.device)


class _CompressedLayer(DynamicSlidingWindowLayer):
    """Stores the uncompressed rows of each token, and compresses all of them in each forward."""

    def __init__(self, cache: Any, index: int, layer: Any) -> None:
        """Replaces `layer`."""
        super().__init__(layer.sliding_window)  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.compress_rate = layer.compress_rate

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Adds rows [1, T, D]. Returns the rows of all complete windows of the sequence, and position 0."""
        kv, gate = self._cache.keys.extend((self._index, name), kv[:, None], gate[:, None])
        whole = kv.shape[2] // self.compress_rate * self.compress_rate
        return kv[:, 0, :whole], gate[:, 0, :whole], 0

    def update_compressor_states(self, _: str, compressed: torch.Tensor) -> torch.Tensor:
        """Returns the given states: they are those of the whole sequence."""
        return compressed

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Returns none: there is no window before the first one."""
        return None, None


class LibraryCache:
    """The cache of a single sequence at a time."""

    def __init__(self, module: PreTrainedModel, parameters: Collection[str]) -> None:
        """Get a cache from the model. `parameters`: the names of the arguments of its forward."""
        self._name = next((name for name in _ARGUMENTS if name in parameters), "")
        token = torch.zeros((1, 1), dtype=torch.int64, device=module.device)
        before = [getattr(part, name) for part, name in _attributes(module)]
        own = getattr(module(input_ids=token, use_cache=True), self._name, None)
        # The attributes in which modules keep state of the sequence themselves.
        self._attributes = [
            (part, name)
            for part, name in _attributes(module)
            if all(getattr(part, name) is not tensor for tensor in before)
        ]
        # The cache before the first token. None: the model makes its cache in its first forward.
        self._empty = _new_cache(module, own) if self._name and isinstance(own, Cache | None) else None
        self._constants = {path for path, _ in _tensors(self._empty)}
        self._cache: Any = None
        # A cache after some tokens. Only the tensors of its state are replaced.
        self._filled: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the next forward."""
        return {self._name: self._cache} if self._name else {}

    def start(self, keys: Keys) -> None:
        """The next forward begins a sequence, whose keys and values are in `keys`."""
        self._cache = copy.deepcopy(self._empty)
        self._set_keys(keys)
        for part, name in self._attributes:
            setattr(part, name, None)

    def go_on(self, keys: Keys, state: Sequence[torch.Tensor]) -> None:
        """The next forward continues from `state`, which it may change, with keys and values in `keys`."""
        self._cache = self._filled
        self._set_keys(keys)
        within = self._tensors_of_cache()
        for tensor, kept in zip(within, state, strict=False):
            tensor.copy_(kept)
        for (part, name), kept in zip(self._attributes, state[len(within) :], strict=True):
            setattr(part, name, kept)

    def ran(self, answer: Any) -> None:
        """Must be called with the model's output after each forward: takes its cache."""
        if self._empty is None and self._name:
            self._cache = getattr(answer, self._name)

    def state(self) -> list[torch.Tensor]:
        """The state after the last forward, valid until the next one."""
        return [*self._tensors_of_cache(), *(getattr(part, name) for part, name in self._attributes)]

    def probed(self, before: Sequence[torch.Size]) -> tuple[StateShape, ...]:
        """The shapes of the state after a second forward. Raises ModelError if `before` it they differed."""
        state = self.state()
        if [tensor.shape for tensor in state] != [*before]:
            raise ModelError("its cache has more than keys and values that grows with the text")
        self._filled = self._cache
        return tuple(StateShape(tuple(tensor.shape), tensor.dtype) for tensor in state)

    def _set_keys(self, keys: Keys) -> None:
        if isinstance(self._cache, _StoredKeys):
            self._cache.keys = keys

    def _tensors_of_cache(self) -> list[torch.Tensor]:
        return [tensor for path, tensor in _tensors(self._cache) if path not in self._constants]


def _new_cache(module: PreTrainedModel, own: Cache | None) -> Cache:
    """A cache of the class that the model made, without keys and values."""
    kind = DynamicCache if own is None else type(own)
    settings = {"config": module.config} if kind is DynamicCache else {}
    cache: Any = type(f"Stored{kind.__name__}", (_StoredKeys, kind), {})(**settings)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicIndexedLayer):
            cache.layers[index] = _IndexedLayer(cache)
        elif hasattr(layer, "store_compression_weights"):
            cache.layers[index] = _CompressedLayer(cache, index, layer)
    return cast(Cache, cache)


def _attributes(module: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """The attributes of modules that are tensors, and neither parameters nor buffers."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield part, name


def _tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in a cache with their paths, always in the same order."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, Keys | PreTrainedConfig) or (path and isinstance(value, Cache)):
        return
    parts: Any = enumerate(value) if isinstance(value, list | tuple) else ()
    if isinstance(value, dict) or hasattr(value, "__dict__"):
        parts = (value if isinstance(value, dict) else vars(value)).items()
    for name, part in parts:
        yield from _tensors(part, (*path, name))
