"""Paged attention for models of the transformers library.

The library calls a registered function for the attention of every layer. It passes each call to the handler
in the model's config, which belongs to this model alone. There are two handlers. `AttentionProbe` runs one
token and records the shapes and arguments of each layer's call, which give the layout of the pages.
`PagedAttention` runs a batch over pages.

The probe refuses unknown arguments by name. None is ignored silently.

Dimension letters: T tokens of the batch; H query heads; K key-value heads; D width of a query and key; E
width of a value; M positions of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kernels.paged_attention import paged_attention
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.page_writes import PageWrites
from workers.models.values import names

# The names of these implementations in the library, which builds masks only for PROBE.
PROBE = "quire_probe"
PAGED = "quire_paged"
# The config attribute that has the handler.
HANDLER_ATTRIBUTE = "_quire_attention"

# Keyword arguments of attention without effect here: dropout is for training, keys and queries are rotated
# already, and the others control what the library returns or keeps. `sliding_window` and `is_causal` repeat
# the mask, which decides in the library too.
_WITHOUT_EFFECT = names(
    """
    dropout position_ids cache_position position_embeddings sliding_window is_causal
    output_attentions output_hidden_states output_router_logits return_dict
    use_cache past_key_values deterministic target_dtype
    """
)

# During the probe a mask is a single number: this code plus its window. So any change by the model is
# noticed.
_MASK_CODE = 1 << 48
_NO_WINDOW = (1 << 47) - 1
_UNKNOWN_MASK = (1 << 47) - 2
# The number of rows of a mask that are checked, and the most positions.
_CHECKED_MASK_ROWS = 64
_CHECKED_MASK_POSITIONS = 1 << 17


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The properties of a layer's attention that are the same for each batch.

    Attributes:
        kv: The shape of its keys and values.
        sliding_window: The number of positions that a token attends to, its own included; None: all.
    """

    kv: LayerKv
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the library.

    Attributes:
        module: The attention layer.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, E].
        mask: The mask that the model passes.
        arguments: The other arguments, by name.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    arguments: dict[str, Any]


class AttentionHandler(Protocol):
    """Computes the attention of all layers of a forward."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The result of a call, [1, T, H, E]."""


@dataclass(slots=True)
class AttentionProbe:
    """Records the calls of a forward of one token, which attends to itself only."""

    calls: list[LayerCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionHandler`. Raises ModelError for a call that is not supported."""
        query, key, value, arguments = call.query, call.key, call.value, call.arguments
        layer = f"attention of layer {len(self.calls)} ({type(call.module).__name__})"
        for name in sorted(arguments.keys() - _WITHOUT_EFFECT - {"scaling", "softcap", "s_aux"}):
            if arguments[name] is not None and arguments[name] is not False:
                raise ModelError(f"{layer} is called with {name}, which is not supported")
        heads, tokens, width = query.shape[1:]
        if query.shape[0] != 1 or key.shape[:3] != value.shape[:3] or key.shape[2] != tokens:
            raise ModelError(f"{layer} has keys of different tokens than its queries, which is not supported")
        if key.shape[3] != width or heads % key.shape[1]:
            raise ModelError(
                f"{layer} has queries {list(query.shape)} that do not fit its keys {list(key.shape)}"
            )
        kv = LayerKv(key.shape[1], width, value.shape[3])
        self.calls.append(LayerCall(kv, _window_from_mask(layer, call.mask)))
        # The token attends to its own value. A sink would scale it, which does not matter for the probe.
        return value.repeat_interleave(heads // key.shape[1], dim=1).transpose(1, 2)


@dataclass(slots=True)
class PagedAttention:
    """Computes the attention of one forward of a batch over pages, and writes its keys and values there.

    Attributes:
        inputs: The batch.
        kv: The pages of `layers`.
        layers: The recorded call of each layer, in order.
        done: The number of calls so far.
    """

    inputs: ForwardInputs
    kv: KvTensors
    layers: tuple[LayerCall, ...]
    done: int = 0
    _writes: PageWrites = field(init=False)

    def __post_init__(self) -> None:
        self._writes = PageWrites(self.inputs.slots)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionHandler`. Mutates the pages."""
        index, self.done = self.done, self.done + 1
        k_pages, v_pages = self.kv.layer(index)
        dtype = k_pages.dtype
        queries, keys, values = (_rows(tensor, dtype) for tensor in (call.query, call.key, call.value))
        self._writes.write(keys, values, k_pages, v_pages)
        scale = call.arguments.get("scaling")
        attended = paged_attention(
            queries,
            k_pages,
            v_pages,
            self.inputs.attention,
            scale=queries.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=self.layers[index].sliding_window,
            **_softcap_and_sinks(call.arguments),
        )  # [T, H, E]
        return attended.to(call.query.dtype)[None]


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, H, T, D] as contiguous [T, H, D]."""
    return tensor[0].transpose(0, 1).to(dtype).contiguous()


def _softcap_and_sinks(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that only few models pass: the cap of scores, and the sinks [H]."""
    options = {}
    if arguments.get("softcap") is not None:
        options["softcap"] = float(arguments["softcap"])
    if arguments.get("s_aux") is not None:
        options["sinks"] = arguments["s_aux"].float().flatten().contiguous()
    return options


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The function that the library calls for each layer."""
    handler: AttentionHandler = getattr(module.config, HANDLER_ATTRIBUTE)
    return handler.attend(AttentionCall(module, query, key, value, attention_mask, arguments)), None


def _window_from_mask(layer: str, mask: torch.Tensor | None) -> int | None:
    """The window of a mask from `_encoded_mask`. Raises ModelError for any other mask."""
    if mask is None:
        raise ModelError(f"{layer} is called without a mask, which is not supported")
    code = int(mask.flatten()[0]) if mask.dtype == torch.int64 and mask.numel() == 1 else 0
    window = code - _MASK_CODE
    if window < 0:
        raise ModelError(f"{layer} has a mask that the model builds itself, which is not supported")
    if window == _UNKNOWN_MASK:
        raise ModelError(
            f"{layer} has a mask that is neither causal nor a sliding window, which is not supported"
        )
    return None if window == _NO_WINDOW else window


def _encoded_mask(
    *, mask_function: Callable[..., Any], config: Any, device: Any = "cpu", **_: Any
) -> torch.Tensor:
    """The window of `mask_function` as one number [1, 1, 1, 1], instead of a mask.

    The function is checked at positions up to the model's limit, so that a mask that differs only in long
    sequences is noticed.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or _CHECKED_MASK_POSITIONS
    length = min(longest, _CHECKED_MASK_POSITIONS)  # M
    keys = torch.arange(length, device=device)  # [M]
    last = _visible_keys(mask_function, length - 1, keys)
    window = int(last.sum())
    found = _NO_WINDOW if window == length else window
    step = max(1, length // _CHECKED_MASK_ROWS)
    for query in {*range(0, length, step), *range(min(length, 8)), length - 2, length - 1} - {-1}:
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(_visible_keys(mask_function, query, keys), expected):
            found = _UNKNOWN_MASK
    # Beyond the checked positions: the last one must attend to all, else the window is larger than was
    # checked.
    for first in range(0, longest, length) if found == _NO_WINDOW and longest > length else ():
        if not _visible_keys(mask_function, longest - 1, (keys + first).clamp(max=longest - 1)).all():
            found = _UNKNOWN_MASK
    return torch.full((1, 1, 1, 1), _MASK_CODE + found, dtype=torch.int64, device=device)


def _visible_keys(mask_function: Callable[..., Any], query: int, keys: torch.Tensor) -> torch.Tensor:
    """Which of the positions `keys` [M] a query attends to, as [M] bool."""
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    seen = mask_function(zero, zero, zero + query, keys)
    return torch.as_tensor(seen, device=keys.device).expand(len(keys)).bool()


# Both names have the same function. PAGED has no mask function, so the library builds no masks.
AttentionInterface.register(PROBE, _attend)
AttentionInterface.register(PAGED, _attend)
AttentionMaskInterface.register(PROBE, _encoded_mask)
