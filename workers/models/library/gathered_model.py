"""A model of the transformers library that runs one sequence at a time, on KV gathered from pages.

It is for models with attention code of their own (bloom, falcon, mpt, gptj), which does not support pages.
That code gets a cache of the library's interface, whose layers copy keys and values from the pages. A step
runs one forward for each of its sequences, so sequences do not share a batch.

Dimension letters: T tokens of an item; C positions of its sequence; K key-value heads; D width of a head; R
wanted rows; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import Cache, DynamicLayer, PreTrainedModel

from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.library.library_model import EAGER, LibraryModel
from workers.models.page_writes import PageWrites

Extend = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes new keys and values [1, K, T, D], and returns those of the whole sequence [1, K, C, D]."""


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer of the library's cache that stores nothing itself."""

    def __init__(self, length: int, extend: Extend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length
        self._extend = extend

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._length += key_states.shape[-2]
        return self._extend(key_states, value_states)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0


class GatheredModel(LibraryModel):
    """A model that stores only keys and values, in the library's cache."""

    # The model's own attention code does not support token trees, and wants plain keys and values.
    takes_trees = False
    packs_kv = False

    def __init__(self, module: PreTrainedModel) -> None:
        """Take ownership of a loaded model, and run one token to find the shapes of its keys and values.

        Raises:
            ModelError: A layer does not store keys and values in the cache.
        """
        super().__init__(module)
        self._set_attention(EAGER)
        self.kv_layers = self._probe()

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        """See `LibraryModel`."""
        wanted = inputs.wanted_rows.tolist()
        starts = list(accumulate(inputs.attention.query_lens, initial=0))
        found: dict[int, torch.Tensor] = {}
        # By layer: the hidden states of each item's wanted rows, in the order of the batch.
        states: dict[int, list[torch.Tensor]] = {
            layer: [] for layer in (() if capture is None else capture.rows)
        }
        for item, (begin, end) in enumerate(pairwise(starts)):
            rows = [row for row in wanted if begin <= row < end]
            if end > begin:
                logits, left = self._run(inputs, kv, item, begin, end, rows, tuple(states))
                found |= dict(zip(rows, logits, strict=True))
                for layer, of_layer in left.items():
                    states[layer].append(of_layer)
        if capture is not None:
            for layer, rows_of_layer in states.items():
                capture.capture_last(layer, torch.cat(rows_of_layer))
        if not wanted:
            vocab_size = self.module.config.get_text_config(decoder=True).vocab_size
            return torch.empty((0, vocab_size), dtype=self.dtype, device=self.device)
        return torch.stack([found[row] for row in wanted])

    def _run(
        self,
        inputs: ForwardInputs,
        kv: KvTensors,
        item: int,
        begin: int,
        end: int,
        rows: list[int],
        layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run one item, which is the rows `begin` to `end` of the batch.

        Returns:
            The logits [len(rows), V] of `rows`, and by layer of `layers` the hidden states of these rows,
            [len(rows), hidden width].
        """
        length = inputs.attention.context_lens_host[item]  # C
        pages = inputs.attention.page_tables[item, : -(-length // kv.page_size)]
        writes = PageWrites(inputs.slots[begin:end])

        def extend_layer(index: int) -> Extend:
            k_pages, v_pages = kv.layer(index)

            def extend(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                keys, values = (new[0].transpose(0, 1).to(kv.dtype).contiguous() for new in (key, value))
                writes.write(keys, values, k_pages, v_pages)
                gathered = (
                    half.data.index_select(0, pages).flatten(0, 1)[:length] for half in (k_pages, v_pages)
                )
                all_keys, all_values = (half.transpose(0, 1)[None] for half in gathered)  # [1, K, C, D]
                return all_keys.to(key.dtype), all_values.to(value.dtype)

            return extend

        before = length - (end - begin)
        cache = Cache([_Layer(before, extend_layer(index)) for index in range(len(self.kv_layers))])
        index = torch.tensor([row - begin for row in rows], dtype=torch.int64, device=self.device)
        positions = {"position_ids": inputs.positions[None, begin:end]} if self._takes_positions else {}
        answer = self.module(
            input_ids=inputs.token_ids[None, begin:end],
            past_key_values=cache,
            use_cache=True,
            **positions,
            **({"logits_to_keep": index} if self._takes_rows else {}),
            **({"output_hidden_states": True} if layers else {}),
        )
        logits: torch.Tensor = answer.logits[0]
        states = {layer: answer.hidden_states[layer][0].index_select(0, index) for layer in layers}
        return logits if self._takes_rows else logits.index_select(0, index), states

    @torch.inference_mode()
    def _probe(self) -> tuple[LayerKv, ...]:
        """The shapes of the keys and values that a forward of one token stores. Raises ModelError."""
        count = self.module.config.get_text_config(decoder=True).num_hidden_layers
        seen: dict[int, LayerKv] = {}

        def note(index: int) -> Extend:
            def extend(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                if index in seen or key.dim() != 4 or key.shape[:3] != value.shape[:3]:
                    raise ModelError(f"layer {index} of {self.name} stores more than keys and values")
                seen[index] = LayerKv(key.shape[1], key.shape[3], value.shape[3])
                return key, value

            return extend

        cache = Cache([_Layer(0, note(index)) for index in range(count)])
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self.module(input_ids=token, past_key_values=cache, use_cache=True)
        ignored = Cache([_Layer(0, lambda key, value: (key, value)) for _ in range(count)])
        self.has_hidden_states = self._outputs_hidden_states(
            input_ids=token, past_key_values=ignored, use_cache=True
        )
        if len(seen) != count:
            raise ModelError(f"{self.name} stores keys and values for {len(seen)} of {count} layers")
        return tuple(seen[index] for index in range(count))
