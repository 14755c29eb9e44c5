"""The self-check of native code: a family's decoder against the transformers library's model of it.

Before the weights of a directory are read, its config is read twice, by us and by the library, and what the
two make of it has to be the same. Then a small copy of the model, with the same kinds of layers and random
weights, runs over pages in native code and plainly in the library: in float32, which shows what is wrong at
all, and in the dtype and on the device that will serve, packed as it will be.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import cast

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kernels.rope import rope_frequencies
from workers.kv.tensors import LayerKv
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.errors import ModelError
from workers.models.library.errors import library_errors
from workers.models.library.settings import LibrarySettings, read_settings
from workers.models.library.small_copy import small_copy
from workers.models.self_check import prove

_log = logging.getLogger(__name__)

# What says how a model is used, and not what it computes.
_NOT_COMPUTED = ("eos_token_ids", "bos_token_id", "dtype", "wrapper")
# Two roundings: after 100,000 positions the fastest pair is off by 0.02 radians.
_FREQUENCY_ERROR = 2.0**-22


def prove_native(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> float | None:
    """The error of a small copy of a directory's model in float32. The weights are not read.

    None where the copy would not be small, which is logged.

    Args:
        directory: The model's.
        config: What we have made of its config.
        dtype: In which it will be served.
        device: Where.

    Raises:
        ModelError: The library reads the config differently, or its model computes something else.
    """
    settings = _text_part(read_settings(directory))
    _check_same_config(directory, config, settings)
    module = small_copy(settings)
    if module is None:
        _log.warning("even a small copy of the model is large, so native code is not checked")
        return None
    _check_same_frequencies(directory, config, module)
    error = _prove_copy(directory, module, torch.float32, torch.device("cpu"))
    if dtype != torch.float32 or device.type != "cpu":
        _prove_copy(directory, module, dtype, device)
    return error


def _text_part(settings: LibrarySettings) -> LibrarySettings:
    text = settings.config.get_text_config(decoder=True)
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(text)])
    return dataclasses.replace(settings, config=text, model_class=model_class)


def _check_same_config(directory: Path, ours: ModelConfig, settings: LibrarySettings) -> None:
    """Raises ModelError for the first field that has another value as the library reads the config.json."""
    theirs = ModelConfig.from_settings(settings.config.to_dict())
    for field in dataclasses.fields(ModelConfig):
        found, expected = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in _NOT_COMPUTED and found != expected:
            raise ModelError(
                f"{directory}: {field.name} is read as {found!r}, and as {expected!r} by the transformers"
                " library: it would answer wrongly; with model_backend = transformers the library runs it"
            )


def _check_same_frequencies(directory: Path, config: ModelConfig, module: PreTrainedModel) -> None:
    """Raises ModelError for a rotary embedding that the library's model does not have.

    The texts of the check are short: how slow pairs turn hardly shows in them, and how fast ones are off.
    """
    theirs = [
        buffer
        for name, buffer in module.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    for rope in config.ropes:
        ours, _ = rope_frequencies(rope, config.rotary_dim)  # [R / 2]
        if not any(
            len(ours) == len(one) and torch.allclose(ours, one, rtol=_FREQUENCY_ERROR, atol=0)
            for one in theirs
        ):
            raise ModelError(
                f"{directory}: the frequencies of {rope} are not those of the transformers library:"
                " it would answer wrongly"
            )


def _prove_copy(directory: Path, module: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> float:
    """The error of native code with the weights of `module`, which is moved to the dtype and device."""
    with library_errors("run a small copy of the model"):
        module.to(device=device, dtype=dtype)  # type: ignore[call-arg]  # the library wraps a method as a function
        module.set_attn_implementation("eager")
        # As the library writes them: experts are one by one there, projections fused or not.
        tensors = revert_weight_conversion(module, module.state_dict())
    config = ModelConfig.from_settings(copy.deepcopy(module.config).to_dict())
    decoder = build_decoder(config, dtype, device)
    with torch.inference_mode():
        for name, target in decoder.targets().items():
            if name not in tensors:
                raise ModelError(f"{directory}: the transformers library has no tensor {name} for this model")
            target.fill(tensors[name])
    decoder.pack()

    def plain(token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = module(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    layer = LayerKv(config.num_key_value_heads, config.head_dim, config.head_dim)
    with library_errors("run a small copy of the model"):
        return prove(
            decoder,
            [layer] * config.num_hidden_layers,
            plain,
            what=f"{directory}: native code for {config.model_type} in {str(dtype).removeprefix('torch.')}",
            vocab_size=config.vocab_size,
            max_seq_len=config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
