"""Loads a Hugging Face directory into the transformers library's model of it, over our pages.

The library builds the model and says which tensor goes where, which for many families is more than a name
(experts are stacked, projections fused). It reads through us: tensors are handed to it one by one as it asks,
from files whose headers were checked, so that the weights are in memory once, and one tensor twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from workers.kv.sizing import available_bytes, check_weights_fit
from workers.models import checkpoint
from workers.models.checkpoint import AUTO, Entry
from workers.models.errors import ModelError
from workers.models.library.errors import library_errors
from workers.models.library.file_tensors import one_by_one, tensors_to_read
from workers.models.library.library_model import LibraryModel, build
from workers.models.library.over_pages import over_pages
from workers.models.library.packed_linear import pack_linears
from workers.models.library.settings import LibrarySettings, read_settings

Progress = Callable[[int, int], None]

# The library splits a tensor of a file into a few parameters at most.
_PARAMETERS_PER_TENSOR, _MORE_PARAMETERS = 8, 256
_NAMES_SHOWN = 3
# Less is a checkpoint in which tensors are missing: loading says which.
_MORE_NUMBERS = 2


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """What there is to say of a model. Fields are those of `ModelConfig`; heads, those of the first layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class LoadedLibraryModel:
    """A model that is ready to run. See `weights.LoadedModel`, whose fields these are."""

    model: LibraryModel
    config: LibraryConfig
    fingerprint: str
    num_parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """A directory that was looked at, of which nothing is in memory yet.

    Attributes:
        weight_bytes: What the model takes, with what it computes from its config.
        num_parameters: Weights; tied ones count once.
    """

    directory: Path
    settings: LibrarySettings
    entries: Mapping[str, Entry]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    num_parameters: int


def plan_library_model(
    directory: Path | str, dtype: torch.dtype | str = AUTO, device: torch.device | str = "cpu"
) -> LibraryPlan:
    """Look at config.json and the headers of the safetensors of a directory.

    Args:
        directory: A Hugging Face model directory.
        dtype: A torch dtype or its name (float32, bfloat16, float16); "auto": the one the config names, else
            that of the first tensor in the files.
        device: Where the model is to go; by way of the machine's memory.

    Raises:
        ModelError: The config cannot be served, or asks for more than the files hold; the message names the
            file and the setting.
        KvSizingError: The weights do not fit into memory.
    """
    directory, device = Path(directory), torch.device(device)
    settings = read_settings(directory)
    entries = checkpoint.read_entries(directory)
    chosen = _choose_dtype(dtype, settings, entries)
    weight_bytes, num_parameters = _measure(directory, settings, entries, chosen)
    check_weights_fit(str(directory), weight_bytes, available_bytes())
    if device.type == "cuda":
        check_weights_fit(str(directory), weight_bytes, torch.cuda.mem_get_info(device)[0])
    return LibraryPlan(directory, settings, entries, chosen, device, weight_bytes, num_parameters)


def load_library_model(plan: LibraryPlan, progress: Progress | None = None) -> LoadedLibraryModel:
    """Load the weights of a plan. Nothing is fetched, and no code of the directory is run.

    Args:
        plan: What to load.
        progress: Told (done_bytes, total_bytes) of the tensors read; the last call has both equal.

    Raises:
        ModelError: The tensors are not those of the model, or it cannot run over pages; the message names the
            tensors, or what is in the way.
    """
    module = _load(plan.directory, plan.settings, plan.entries, plan.dtype, progress)
    _check_finite(plan.directory, module)
    with library_errors("run the model"):
        module.to(device=plan.device)  # type: ignore[call-arg]  # the library wraps a method as a function
        pack_linears(module)
        model = over_pages(module)
    return LoadedLibraryModel(
        model=model,
        config=_describe(plan.settings, model),
        fingerprint=checkpoint.fingerprint(plan.entries, plan.settings.digest),
        num_parameters=plan.num_parameters,
        weight_bytes=plan.weight_bytes,
    )


def _describe(settings: LibrarySettings, model: LibraryModel) -> LibraryConfig:
    text, first = settings.config.get_text_config(decoder=True), model.layers[0]
    return LibraryConfig(
        model_type=settings.config.model_type,
        vocab_size=settings.vocab_size,
        hidden_size=text.hidden_size,
        num_hidden_layers=len(model.layers),
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=first.kv_heads,
        head_dim=first.key_dim,
        max_position_embeddings=settings.max_position_embeddings,
        eos_token_ids=settings.eos_token_ids,
        bos_token_id=settings.bos_token_id,
    )


def _choose_dtype(
    dtype: torch.dtype | str, settings: LibrarySettings, entries: Mapping[str, Entry]
) -> torch.dtype:
    """The dtype to load in. Raises ModelError."""
    named = settings.config.get_text_config(decoder=True).dtype or settings.config.dtype
    stored = next((entry.dtype for entry in entries.values() if entry.dtype in checkpoint.DTYPES), None)
    return checkpoint.choose_dtype(dtype, str(named).removeprefix("torch.") if named else None, stored)


def _measure(
    directory: Path, settings: LibrarySettings, entries: Mapping[str, Entry], dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes that the model takes, with all it computes from its config, and how many weights there are.

    Builds it without memory. Raises ModelError if it needs more than the files hold.
    """
    stored = sum(math.prod(entry.shape) for entry in entries.values())
    most = _PARAMETERS_PER_TENSOR * len(entries) + _MORE_PARAMETERS
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen > most:
            raise ModelError(
                f"{directory}: the config asks for more than {most} parameters, the files hold"
                f" {len(entries)} tensors"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        with library_errors("build the model"), torch.device("meta"), no_init_weights():
            module = build(settings.model_class, settings.config, dtype)
            module.tie_weights()
    finally:
        hook.remove()
    numbers = sum(parameter.numel() for parameter in module.parameters())
    if numbers > _MORE_NUMBERS * stored:
        raise ModelError(f"{directory}: the config asks for {numbers} numbers, the files hold {stored}")
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    return sum(parameter.nbytes for parameter in module.parameters()) + buffers, numbers


def _load(
    directory: Path,
    settings: LibrarySettings,
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
    progress: Progress | None,
) -> PreTrainedModel:
    """The model with its weights, in the machine's memory. Raises ModelError for tensors that do not fit."""
    total_bytes = sum(entry.nbytes for entry in entries.values())
    tensors = tensors_to_read(entries, total_bytes, progress)
    with library_errors("load the weights"), one_by_one():
        load: Any = settings.model_class.from_pretrained
        module, info = load(
            None,
            config=settings.config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if progress is not None:
        progress(total_bytes, total_bytes)
    _check_loaded(directory, settings, info)
    assert isinstance(module, PreTrainedModel)
    _check_tied(directory, module)
    return module


def _check_loaded(directory: Path, settings: LibrarySettings, info: Mapping[str, Any]) -> None:
    """Raises ModelError unless each tensor of the files has a parameter, and each parameter a tensor."""
    model = f"this {settings.config.model_type} model"
    if info["mismatched_keys"]:
        name, found, asked = min(info["mismatched_keys"], key=str)
        raise ModelError(
            f"{directory}: tensor {name} has shape {list(found)}, the config asks for {list(asked)}"
        )
    if info["missing_keys"]:
        raise ModelError(f"{directory}: tensor {_names(info['missing_keys'])} is missing")
    if info["unexpected_keys"]:
        raise ModelError(f"{directory}: tensor {_names(info['unexpected_keys'])} is not part of {model}")
    if info.get("error_msgs") or info.get("conversion_errors"):
        raise ModelError(f"{directory}: tensors could not be converted for {model}")


def _check_tied(directory: Path, module: PreTrainedModel) -> None:
    """Raises ModelError for tensors that differ, where the config says that they are one.

    The library takes each as it is, against the config, and no longer counts them among those that are tied.
    """
    wanted: Mapping[str, str] = module.get_expanded_tied_weights_keys(all_submodels=True)
    for name, other in wanted.items():
        if name not in module.all_tied_weights_keys:
            raise ModelError(
                f"{directory}: tensor {name} differs from {other}, and tie_word_embeddings says that they are"
                " one"
            )


def _names(names: set[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + more


def _check_finite(directory: Path, module: PreTrainedModel) -> None:
    """Raises ModelError for a weight that is not finite."""
    with torch.inference_mode():
        for name, parameter in module.named_parameters():
            checkpoint.check_finite(parameter, f"{directory}: tensor {name}")
