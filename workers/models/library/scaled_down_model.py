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
# Windows are shorter than the sequences of the self-check, so that an ignored window changes the logits. Few
# tokens are compressed to a key, so that there are more keys than are chosen.
_MOST = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "ngram_vocab_size_base": VOCAB_SIZE,
    "sliding_window": 8,
    "index_topk": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "compress_rates": 2,
}
_MAX_LAYERS = 12
INNER_WIDTH = 64
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_MAX_BYTES = 2 << 30
GAIN = 1.5


def scaled_down_model(settings: LibrarySettings, inner_width: int = INNER_WIDTH) -> PreTrainedModel | None:
    """The model, on the CPU; None if even that would take gigabytes. Raises ModelError.

    `inner_width`: the width of the MLP, unless the model's is smaller.
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
    for name, most in _MOST.items():
        value = getattr(text, name, None)
        if isinstance(value, int):
            setattr(text, name, min(value, most))
        elif isinstance(value, dict):
            setattr(text, name, {kind: min(each, most) for kind, each in value.items()})
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        # Some families require these tokens, and some compute with the end token.
        try:
            setattr(text, name, None if name != "eos_token_id" else 0)
        except StrictDataclassFieldValidationError:
            setattr(text, name, 0)
    if hasattr(text, "autocast_kernel_dtype"):
        text.autocast_kernel_dtype = "float32"
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
    kinds, types = [*lists.values()], getattr(text, "layer_types", None)
    if isinstance(types, list) and len(types) == layers and types not in kinds:
        kinds.append(types)  # computed from other settings
    kept = _layers_of_each_kind(text, kinds, layers, first_shared, any_of_them=len(kinds) == len(lists))
    sharing = range(first_shared, layers)[: len(kept)]
    if sharing:
        text.num_kv_shared_layers = len(sharing)
    text.num_hidden_layers = len(kept) + len(sharing)
    if hasattr(text, "num_blocks"):  # xLSTM's name for the number of layers
        text.num_blocks = text.num_hidden_layers
    for name, value in lists.items():
        setattr(text, name, [value[index] for index in (*kept, *sharing)])


def _layers_of_each_kind(
    text: PreTrainedConfig, lists: list[list[Any]], layers: int, below: int, *, any_of_them: bool
) -> list[int]:
    """Layers before `below` that include each kind of layer: the first ones.

    If they are too many and it may be `any_of_them`, the first of each kind, and others.
    """
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] or [""] * layers
    of_each = sorted({kinds.index(kind) for kind in kinds})
    # If the first layers are dense, include one that is not.
    dense = max(getattr(text, name, 0) or 0 for name in ("first_k_dense_replace", "num_dense_layers"))
    count = max(2, of_each[-1] + 1, dense + 1) if of_each else 0
    if count <= _MAX_LAYERS or len(of_each) > _MAX_LAYERS or not any_of_them:
        return [*range(below)][: min(count, _MAX_LAYERS)]
    of_each = [index for index in of_each if index < below]
    others = [index for index in range(below) if index not in of_each]
    return sorted([*of_each, *others[: _MAX_LAYERS - len(of_each)]])


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Give a model weights that make attention sharp and norms different."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Weights of norms vary around 1, so that swapping two norms changes the logits.
        parameter.copy_(
            1 + 0.3 * noise if parameter.dim() < 2 else noise * (GAIN * parameter.shape[-1] ** -0.5)
        )
