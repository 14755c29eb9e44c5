"""A small copy of a model: the same kinds of layers and the same attention, random weights, in float32.

In the dtype of a large model a wrong attention may look like rounding; in a copy that fits into float32 it
does not. Layers are cut to as many as have one of each kind, the vocabulary and what lies inside feed-forward
parts to little; widths and heads stay. Weights are random, of a size with which attention is sharp.
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
# Less than a text of the self-check, so that what a window hides is missed if it is seen.
_WINDOW = 8
_MOST_LAYERS = 12
_INNER_WIDTH = 64
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_MOST_BYTES = 2 << 30
_GAIN = 1.5


def small_copy(settings: LibrarySettings) -> PreTrainedModel | None:
    """The copy, on the CPU; None where even that would take gigabytes. Raises ModelError."""
    config = copy.deepcopy(settings.config)
    with library_errors("build a small copy of the model to check"):
        _shrink(config.get_text_config(decoder=True))
        with torch.device("meta"), no_init_weights():
            planned = build(settings.model_class, config, torch.float32)
        tensors = (*planned.parameters(), *planned.buffers())
        if sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
            return None
        model = build(settings.model_class, config, torch.float32)
        _randomise(model)
    return model


def _shrink(text: PreTrainedConfig) -> None:
    """Cut a config down in place."""
    layers = text.num_hidden_layers
    lists = {
        name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers
    }
    kept = _layers_of_each_kind(text, list(lists.values()), layers)
    text.num_hidden_layers = kept
    for name, value in lists.items():
        setattr(text, name, value[:kept])
    text.vocab_size = min(text.vocab_size, VOCAB_SIZE)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        try:
            setattr(text, name, None)
        except StrictDataclassFieldValidationError:  # some families have to have one
            setattr(text, name, 0)
    if isinstance(getattr(text, "sliding_window", None), int):
        text.sliding_window = min(text.sliding_window, _WINDOW)
    for name in (*vars(text), *text.attribute_map):
        if name.endswith(_INNER) and isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), _INNER_WIDTH))


def _layers_of_each_kind(text: PreTrainedConfig, lists: list[list[Any]], layers: int) -> int:
    """The first layers that have between them all that a config says of any single layer."""
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] or [""] * layers
    kept = max((kinds.index(kind) for kind in set(kinds)), default=0) + 1
    # Of a model whose first layers only are dense, one that is not.
    dense = getattr(text, "first_k_dense_replace", 0) or 0
    return min(layers, _MOST_LAYERS, max(2, kept, dense + 1))


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Norms lie around 1, so that mixing two of them up shows.
        parameter.copy_(
            1 + 0.3 * noise if parameter.dim() < 2 else noise * (_GAIN * parameter.shape[-1] ** -0.5)
        )
