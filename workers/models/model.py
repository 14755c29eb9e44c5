"""The interface of all models, their description, and the pages that they need.

Dimension letters: R wanted rows; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.packed_pages import PackedKeys
from workers.common.machine_limits import available_bytes
from workers.kv.sizing import StateSizes, check_fits
from workers.kv.state_tensors import StateShape, StateTensors, state_bytes
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The description of a model for clients, named as in the protos. Sizes in elements, tokens and bytes.

    Attributes:
        num_kv_heads: That of the first layer with keys and values, like `head_dim`. 0: there is none.
        num_parameters: The number of weights; tied ones count once.
        weight_bytes: The bytes of the parameters in memory.
        fingerprint: 32 hexadecimal digits that distinguish models: a hash of the config and of the weights in
            the files. It does not depend on the loaded dtype or on the sharding.
        backend: "native" or "transformers".
        quantization: The format of the weights, such as "q8_0"; "": they have the dtype.
        rounds_rows: See `LoadPlan`. Clients read it in `ExecutorCapabilities.products`.
        moe_layers: The number of layers whose experts can be captured and given. `moe_layer_ids`: which ones.
    """

    architecture: str
    vocab_size: int
    max_seq_len: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    model_id: str = ""
    num_parameters: int = 0
    weight_bytes: int = 0
    eos_token_ids: Sequence[int] = ()
    bos_token_id: int | None = None
    fingerprint: str = ""
    backend: str = "native"
    moe_layers: int = 0
    moe_layer_ids: Sequence[int] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    quantization: str = ""
    rounds_rows: bool = True


class Model(Protocol):
    """A model that reads and writes paged KV."""

    dtype: torch.dtype
    device: torch.device
    # The shape of a token's keys and values in each layer that has any.
    kv_layers: tuple[LayerKv, ...]
    # The tensors of a sequence's recurrent state, in all layers. None: it has no such layers.
    state_shapes: tuple[StateShape, ...]
    # Whether `forward` fills `capture`.
    has_hidden_states: bool
    # Whether its attention supports token trees; see `AttentionBatch`.
    takes_trees: bool
    # Whether only kernels read its pages, so that they may be packed.
    packs_kv: bool
    # Whether the bits of a row depend only on the tokens up to it: not on the rest of the batch or on chunks.
    batch_invariant: bool
    # Whether its decodes may be captured as CUDA graphs.
    graphable: bool
    # Memory in bytes for each position that fits into the pages, allocated in the first step.
    rotation_bytes: int
    # The slots for adapters. 0: it takes none, or they are not allocated yet; see `Adapted`.
    max_lora_slots: int

    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        """Run a batch. Writes its K and V to their slots, and fills `capture`.

        Returns [R, ...], the wanted rows, for `logits`.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of the result of `forward`, in the model's dtype or float32."""


# How pages are stored: in the model's dtype, in bfloat16, or in 8 bits that are multiplied as bfloat16.
AUTO_KV, BFLOAT16_KV, INT8_KV = "auto", "bfloat16", "int8"


def state_sizes(model: Model, kv_dtype: str = AUTO_KV) -> StateSizes:
    """The number of states that a model needs besides its pages, and the distance between them."""
    dtype, quantised = _kv_format(model, kv_dtype)
    kv_bytes = KvTensors.page_bytes(model.kv_layers, page_size=PAGE_SIZE, dtype=dtype, quantised=quantised)
    return StateSizes(state_bytes(model.state_shapes), kv_bytes, PAGE_SIZE)


def page_bytes(model: Model, kv_dtype: str = AUTO_KV) -> int:
    """The bytes of one page: keys and values of all layers, and its share of the states."""
    return state_sizes(model, kv_dtype).bytes_per_page


def new_pages(model: Model, num_pages: int, kv_dtype: str = AUTO_KV) -> KvTensors:
    """Allocate pages for a model, and states, if it has recurrent layers, on its device.

    Raises ValueError if there are no kernels for this model with such pages, KvSizingError if main memory is
    too small for the states, whose size does not follow from the files' sizes.
    """
    dtype, quantised = _kv_format(model, kv_dtype)
    states = None
    if model.state_shapes:
        sizes = state_sizes(model, kv_dtype)
        num_states = sizes.num_states(num_pages)
        if model.device.type == "cpu":
            check_fits("the recurrent states", num_states * sizes.bytes_per_state, available_bytes())
        states = StateTensors(model.state_shapes, num_states, sizes.spacing, model.device)
    return KvTensors(
        model.kv_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=dtype,
        device=model.device,
        pack=model.packs_kv,
        states=states,
        quantised=quantised,
        row_dtype=model.dtype,
    )


def kv_dtype_of_quantised(model: Model) -> str:
    """The default format of pages of a quantised model: float32 activations do not need float32 KV."""
    if not model.kv_layers:
        return AUTO_KV
    keys, _ = new_pages(model, 1).layer(0)
    is_free = model.dtype is torch.float32 and isinstance(keys, PackedKeys)
    return BFLOAT16_KV if is_free else AUTO_KV


def _kv_format(model: Model, kv_dtype: str) -> tuple[torch.dtype, bool]:
    """The dtype of products with pages, and whether pages have 8 bits."""
    return model.dtype if kv_dtype == AUTO_KV else torch.bfloat16, kv_dtype == INT8_KV
