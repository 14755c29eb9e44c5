"""The attention of the transformers library's models, answered over our pages.

The library calls a registered function for the attention of every layer. Who answers is the step that the
model carries at the time, in its config, which no other model shares. There are two kinds. An `AskingStep`
runs one token and notes what each layer calls with: from that comes the shape of the pages. A `PagedStep`
runs a batch.

What a call asks for and we do not know is refused while asking, by name: nothing is ignored.

Dimension letters: T tokens of the batch; H query heads; K key-value heads; D width of a query and key; E
width of a value; M positions of the longest text.
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
from workers.models.library.page_writes import PageWrites

# Names of the library's attention implementations that are ours. While asking, masks are made as well.
ASKING = "quire_asking"
PAGED = "quire_paged"
# Where a config carries the step.
STEP = "_quire_step"

# Keyword arguments of attention that say nothing of what is to be computed here: dropout is of training, the
# positions are in keys and queries already, the rest is about what the library returns or keeps.
# `sliding_window` and `is_causal` repeat what the mask says, by which the library's own code goes.
_WITHOUT_EFFECT = frozenset(
    [
        "dropout",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "sliding_window",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
        "past_key_values",
        "deterministic",
        "target_dtype",
    ]
)

# While asking, a mask is this number plus the window that it makes; so what a model does with it shows.
_MASK_MARK = 1 << 48
_NO_WINDOW = (1 << 47) - 1
_ODD_MASK = (1 << 47) - 2
# Rows of a mask that are looked at, and the most positions.
_MASK_ROWS = 64
_MASK_POSITIONS = 1 << 17


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer's attention is called with, whatever the batch.

    Attributes:
        kv: The shape of its keys and values.
        sliding_window: Positions that a token sees, its own included; None: all of them.
    """

    kv: LayerKv
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the library.

    Attributes:
        module: Whose attention it is.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, E].
        mask: What the model gives as a mask.
        arguments: All else, by name.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    arguments: dict[str, Any]


class Step(Protocol):
    """Who answers the attention of a forward."""

    def attend(
        self,
        call: AttentionCall,
    ) -> torch.Tensor:
        """[1, T, H, E] of a call."""


@dataclass(slots=True)
class AskingStep:
    """Notes the calls of a forward of one token, which attends to itself alone."""

    calls: list[LayerCall] = field(default_factory=list)

    def attend(
        self,
        call: AttentionCall,
    ) -> torch.Tensor:
        """See `Step`. Raises ModelError for what is not understood."""
        query, key, value, arguments = call.query, call.key, call.value, call.arguments
        layer = f"attention of layer {len(self.calls)} ({type(call.module).__name__})"
        for name in sorted(arguments.keys() - _WITHOUT_EFFECT - {"scaling", "softcap", "s_aux"}):
            if arguments[name] is not None and arguments[name] is not False:
                raise ModelError(f"{layer} is called with {name}, which is not supported")
        heads, tokens, width = query.shape[1:]
        if query.shape[0] != 1 or key.shape[:3] != value.shape[:3] or key.shape[2] != tokens:
            raise ModelError(f"{layer} has keys of other tokens than its queries, which is not supported")
        if key.shape[3] != width or heads % key.shape[1]:
            raise ModelError(f"{layer} has {list(query.shape)} queries for {list(key.shape)} keys")
        kv = LayerKv(key.shape[1], width, value.shape[3])
        self.calls.append(LayerCall(kv, _window_of(layer, call.mask)))
        # What the token itself attends to is its own value, or a part of it beside a sink: of no matter here.
        return value.repeat_interleave(heads // key.shape[1], dim=1).transpose(1, 2)


@dataclass(slots=True)
class PagedStep:
    """Attends a batch over pages, and writes its keys and values there. One forward each.

    Attributes:
        inputs: The batch.
        kv: The pages of `layers`.
        layers: What was noted of each call, in their order.
        done: Calls so far.
    """

    inputs: ForwardInputs
    kv: KvTensors
    layers: tuple[LayerCall, ...]
    done: int = 0
    _writes: PageWrites = field(init=False)

    def __post_init__(self) -> None:
        self._writes = PageWrites(self.inputs.slots)

    def attend(
        self,
        call: AttentionCall,
    ) -> torch.Tensor:
        """See `Step`. Mutates the pages."""
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
            **_extras(call.arguments),
        )  # [T, H, E]
        return attended.to(call.query.dtype)[None]


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, H, T, D] as contiguous [T, H, D]."""
    return tensor[0].transpose(0, 1).to(dtype).contiguous()


def _extras(arguments: dict[str, Any]) -> dict[str, Any]:
    """What few models ask of attention, where they do: the cap of scores and the sinks [H]."""
    extras = {}
    if arguments.get("softcap") is not None:
        extras["softcap"] = float(arguments["softcap"])
    if arguments.get("s_aux") is not None:
        extras["sinks"] = arguments["s_aux"].float().flatten().contiguous()
    return extras


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What is registered."""
    step: Step = getattr(module.config, STEP)
    return step.attend(AttentionCall(module, query, key, value, attention_mask, arguments)), None


def _window_of(layer: str, mask: torch.Tensor | None) -> int | None:
    """The window of a mask that `_marked_mask` made. Raises ModelError for any other."""
    if mask is None:
        raise ModelError(f"{layer} is called without a mask, which is not supported")
    mark = int(mask.flatten()[0]) if mask.dtype == torch.int64 and mask.numel() == 1 else 0
    window = mark - _MASK_MARK
    if window < 0:
        raise ModelError(f"{layer} has a mask of the model's own making, which is not supported")
    if window == _ODD_MASK:
        raise ModelError(f"{layer} has a mask that is neither causal nor a sliding window")
    return None if window == _NO_WINDOW else window


def _marked_mask(
    *, mask_function: Callable[..., Any], config: Any, device: Any = "cpu", **_: Any
) -> torch.Tensor:
    """In the place of a mask: which window `mask_function` makes, looked at as far as the model reaches.

    The function says of positions which of them see which; so a mask that differs only in long texts is seen.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or _MASK_POSITIONS
    length = min(longest, _MASK_POSITIONS)  # M
    keys = torch.arange(length, device=device)  # [M]
    last = _seen(mask_function, length - 1, keys)
    window = int(last.sum())
    found = _NO_WINDOW if window == length else window
    step = max(1, length // _MASK_ROWS)
    for query in {*range(0, length, step), *range(min(length, 8)), length - 2, length - 1} - {-1}:
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(_seen(mask_function, query, keys), expected):
            found = _ODD_MASK
    # The last position sees all before it, or the window is larger than what was looked at.
    for first in range(0, longest, length) if found == _NO_WINDOW and longest > length else ():
        if not _seen(mask_function, longest - 1, (keys + first).clamp(max=longest - 1)).all():
            found = _ODD_MASK
    return torch.full((1, 1, 1, 1), _MASK_MARK + found, dtype=torch.int64, device=device)


def _seen(mask_function: Callable[..., Any], query: int, keys: torch.Tensor) -> torch.Tensor:
    """Which keys [M] a query sees, as [M] bool."""
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    seen = mask_function(zero, zero, zero + query, keys)
    return torch.as_tensor(seen, device=keys.device).expand(len(keys)).bool()


# Both names have the same attention. Without a mask function of the name, the library makes no masks.
AttentionInterface.register(ASKING, _attention)
AttentionInterface.register(PAGED, _attention)
AttentionMaskInterface.register(ASKING, _marked_mask)
