"""A scaled-down model: the same kinds of layers and the same attention, with random weights in float32.

In a half-precision dtype wrong attention may look like rounding; in float32 it does not. The scaled-down
model has as many of the first layers as include each kind of layer, a small vocabulary and narrow
feed-forward parts. Widths and heads stay. The random weights are large enough that attention is concentrated
on few tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from workers.models.library.errors import library_errors
from workers.models.library.library_model import build
from workers.models.library.settings import LibrarySettings

VOCAB_SIZE = 1000
# Shorter than the sequences of the self-check, so that an ignored window changes the logits.
_WINDOW = 8
_MAX_LAYERS = 12
INNER_WIDTH = 64
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_MAX_BYTES = 2 << 30
GAIN = 1.5


def scaled_down_model(settings: LibrarySettings, inner_width: int = INNER_WIDTH) -> PreTrainedModel | None:
    """The model, on the CPU; None if even that would take gigabytes. Raises ModelError.

    `inner_width`: of the MLP, if that of the model is not smaller.
    """
    config = copy.deepcopy(settings.config)
    with library_errors("build a scaled-down model for the self-check"):
        _shrink(config.get_text_config(decoder=True), inner_width)
        with torch.device("meta"), no_init_weights():
            planned = build(settings.model_class, config, torch.float32)
        tensors = (*planned.parameters(), *planned.buffers())
        if sum(tensor.nbytes for tensor in tensors) > _MAX_BYTES:
            return None
        model = build(settings.model_class, config, torch.float32)
        randomise(model)
    return model


def _shrink(text: PreTrainedConfig, inner_width: int) -> None:
    """Scale a config down. Mutates it."""
    _drop_layers(text)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), VOCAB_SIZE))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        try:
            setattr(text, name, None)
        except StrictDataclassFieldValidationError:  # some families must have one
            setattr(text, name, 0)
    if isinstance(getattr(text, "sliding_window", None), int):
        text.sliding_window = min(text.sliding_window, _WINDOW)
    for name in (*vars(text), *text.attribute_map):
        width = getattr(text, name, None) if name.endswith(_INNER) else None
        if isinstance(width, int):
            setattr(text, name, min(width, inner_width))
        elif isinstance(width, list):
            setattr(text, name, [min(each, inner_width) for each in width])


def _drop_layers(text: PreTrainedConfig) -> None:
    """Keep as many of the first layers as include each kind of layer. Mutates the config."""
    layers = text.num_hidden_layers
    if per_stack := getattr(text, "num_layers_per_stack", None):  # a stack of layers that runs several times
        text.num_layers_per_stack, text.num_hidden_layers = 1, layers // per_stack
        return
    lists = {
        name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers
    }
    # The last layers of some families read the keys and values of earlier ones of their type.
    first_shared = layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    types = getattr(text, "layer_types", None)  # which may be computed from other settings
    kinds = [*lists.values(), *([types] if isinstance(types, list) and len(types) == layers else [])]
    kept = range(first_shared)[: _layers_of_each_kind(text, kinds, layers)]
    sharing = range(first_shared, layers)[: len(kept)]
    if sharing:
        text.num_kv_shared_layers = len(sharing)
    text.num_hidden_layers = len(kept) + len(sharing)
    for name, value in lists.items():
        setattr(text, name, [value[index] for index in (*kept, *sharing)])


def _layers_of_each_kind(text: PreTrainedConfig, lists: list[list[Any]], layers: int) -> int:
    """How many of the first layers include each kind of layer."""
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] or [""] * layers
    kept = max((kinds.index(kind) for kind in set(kinds)), default=0) + 1
    # If the first layers are dense, include one that is not.
    dense = getattr(text, "first_k_dense_replace", 0) or 0
    return min(layers, _MAX_LAYERS, max(2, kept, dense + 1))


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Give a model weights with which attention is sharp, and norms differ."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Weights of norms vary around 1, so that swapping two norms changes the logits.
        parameter.copy_(
            1 + 0.3 * noise if parameter.dim() < 2 else noise * (GAIN * parameter.shape[-1] ** -0.5)
        )
