"""Loads a Hugging Face directory into a model of the transformers library that runs over pages.

The library builds the model and places each tensor, which for many families is more than a lookup (experts
are stacked, projections fused). It reads the tensors one by one through `file_tensors`, from files whose
headers were checked. So the weights are in memory once, and only one tensor twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from kernels.weight_formats import WeightFormat
from workers.common.machine_limits import available_bytes
from workers.kv.sizing import check_fits
from workers.models import checkpoint
from workers.models.checkpoint import AUTO, StoredTensor
from workers.models.errors import ModelError
from workers.models.library.activations import fix_activations
from workers.models.library.errors import library_errors
from workers.models.library.file_tensors import Reads, sequential_reads, tensors_to_read
from workers.models.library.gathered_model import GatheredModel, keeps_more
from workers.models.library.library_model import LibraryModel, build
from workers.models.library.packed_linear import pack_linears
from workers.models.library.packed_model import PackedModel
from workers.models.library.quantised_parts import QuantisedParts
from workers.models.library.settings import LibrarySettings, read_settings
from workers.models.model import ModelDescription
from workers.models.source import source_of
from workers.models.text_part import of_text_model
from workers.models.weights import UNROUNDED, Progress, names_of

_log = logging.getLogger(__name__)

# The library splits a tensor of a file into at most a few parameters.
_PARAMETERS_PER_TENSOR, _EXTRA_PARAMETERS = 8, 256
_NAMES_SHOWN = 3
# The most weights of the model, relative to those in the files. Below this, loading names the missing
# tensors.
_MAX_WEIGHTS_RATIO = 2


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """A directory that passed all checks before its weights are read.

    Attributes:
        weight_bytes: The bytes of the weights, and of the buffers that the model computes from its config.
        num_parameters: The number of weights; tied ones count once.
        held: The formats of the tensors that stay quantised.
        rounds_rows: See `workers.models.weights.LoadPlan`.
    """

    directory: Path
    settings: LibrarySettings
    entries: Mapping[str, StoredTensor]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    num_parameters: int
    held: Mapping[str, WeightFormat]
    rounds_rows: bool


def plan_library_model(
    directory: Path | str,
    dtype: torch.dtype | str = AUTO,
    device: torch.device | str = "cpu",
    *,
    rounds_rows: bool = True,
) -> LibraryPlan:
    """Check config.json and the headers of the safetensors of a directory.

    Args:
        directory: A Hugging Face model directory, or another `ModelSource`. On a GPU quantised tensors are
            dequantised.
        dtype: A torch dtype or its name (float32, bfloat16, float16); "auto": the dtype that the config
            names, else that of the first tensor in the files; on a CPU float32 for float16.
        device: The device of the model. The weights are loaded into the host's memory first.
        rounds_rows: See `LibraryPlan`.

    Raises:
        ModelError: The config cannot be served, or asks for more weights than the files have; the message
            names the file and the setting.
        KvSizingError: The weights do not fit into memory.
    """
    directory, device = Path(directory), torch.device(device)
    source = source_of(directory)
    if not source.library_can_run:
        raise ModelError(f"{directory}: is a model in MXFP4, or a GGUF file's, that needs native code")
    settings = read_settings(directory)
    for note in source.notes():
        _log.info("%s: %s", source.config_file.name, note)
    entries = source.tensors()
    if settings.is_text_part:
        entries = dict(of_text_model(entries.items()))
    config_dtype = settings.config.get_text_config(decoder=True).dtype or settings.config.dtype
    named = checkpoint.name_of(config_dtype) if config_dtype else None
    stored = next((entry.dtype for entry in entries.values() if entry.dtype in checkpoint.DTYPES), None)
    chosen = checkpoint.choose_dtype(dtype, named, stored, device)
    parts = QuantisedParts(entries if device.type == "cpu" else {}, chosen, "meta")
    weight_bytes, num_parameters = _model_size(directory, settings, entries, chosen, parts)
    weights = f"the weights of {directory}"
    check_fits(weights, weight_bytes, available_bytes())
    if device.type == "cuda":
        check_fits(weights, weight_bytes, torch.cuda.mem_get_info(device)[0])
    held = {name: form for name in parts.targets if (form := entries[name].form) is not None}
    return LibraryPlan(
        directory, settings, entries, chosen, device, weight_bytes, num_parameters, held, rounds_rows
    )


def load_library_model(
    plan: LibraryPlan, progress: Progress | None = None
) -> tuple[LibraryModel, ModelDescription]:
    """Load the weights of a plan. Does not use the network, and runs no code of the directory.

    Args:
        plan: The result of `plan_library_model`.
        progress: Called with (done_bytes, total_bytes) of the tensors read. In the last call both are equal.

    Raises:
        ModelError: The tensors do not fit the model, or it cannot run over pages; the message names the
            tensors, or the reason.
    """
    module = _load(plan, progress)
    with torch.inference_mode():
        for name, parameter in module.named_parameters():
            checkpoint.check_finite(parameter, f"{plan.directory}: tensor {name}")
    with library_errors("run the model"):
        module.to(device=plan.device)  # type: ignore[call-arg]  # the library wraps a method as a function
        pack_linears(module)
        if plan.device.type == "cpu":
            fix_activations(module)
        model = make_library_model(module)
    if isinstance(model, GatheredModel):
        _log.info("each sequence of a step runs by itself, which is slow: %s", model.why_not_packed)
    settings, first = plan.settings, next(iter(model.kv_layers), None)
    products = UNROUNDED if plan.held and not plan.rounds_rows else ""
    text = settings.config.get_text_config(decoder=True)
    return model, ModelDescription(
        architecture=settings.config.model_type,
        vocab_size=settings.vocab_size,
        max_seq_len=settings.max_position_embeddings,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=0 if first is None else text.num_attention_heads,
        num_kv_heads=0 if first is None else first.kv_heads,
        head_dim=0 if first is None else first.key_dim,
        dtype=checkpoint.name_of(model.dtype),
        num_parameters=plan.num_parameters,
        weight_bytes=plan.weight_bytes,
        eos_token_ids=settings.eos_token_ids,
        bos_token_id=settings.bos_token_id,
        fingerprint=checkpoint.fingerprint(plan.entries, settings.digest + products),
        backend="transformers",
        quantization=names_of(plan.held),
        rounds_rows=plan.rounds_rows,
    )


def make_library_model(module: PreTrainedModel) -> LibraryModel:
    """Make a loaded model run over pages: a whole batch at once if possible, else one sequence at a time.

    Takes ownership of `module`.

    Raises ModelError if neither is possible. The message has both reasons.
    """
    try:
        with library_errors("run a batch of the model"):
            if keeps_more(module):
                raise ModelError(
                    f"{type(module).__name__} keeps more than keys and values, so sequences cannot be packed"
                )
            return PackedModel(module)
    except ModelError as error:
        why_not_packed = str(error)
    try:
        with library_errors("run a sequence of the model on a cache"):
            return GatheredModel(module, why_not_packed)
    except ModelError as error:
        raise ModelError(f"the model cannot run over pages: {why_not_packed}; and {error}") from None


def _model_size(
    directory: Path,
    settings: LibrarySettings,
    entries: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    parts: QuantisedParts,
) -> tuple[int, int]:
    """The bytes of the model's weights and buffers, and the number of its weights.

    Builds the model on the device "meta". Raises ModelError if it needs far more weights than the files have.
    """
    stored = sum(math.prod(entry.shape) for entry in entries.values())
    max_parameters = _PARAMETERS_PER_TENSOR * len(entries) + _EXTRA_PARAMETERS
    registered = 0

    def count(*_: object) -> None:
        nonlocal registered
        registered += 1
        if registered > max_parameters:
            raise ModelError(
                f"{directory}: the config asks for more than {max_parameters} parameters, but the files have"
                f" {len(entries)} tensors"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        with library_errors("build the model"), torch.device("meta"), no_init_weights():
            module = build(parts.in_models_of(settings.model_class), settings.config, dtype)
            module.tie_weights()
    finally:
        hook.remove()
    weights = sum(parameter.numel() for parameter in module.parameters())
    weights += sum(math.prod(target.shape) for target in parts.targets.values())
    if weights > _MAX_WEIGHTS_RATIO * stored:
        raise ModelError(f"{directory}: the config asks for {weights} weights, but the files have {stored}")
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    return sum(parameter.nbytes for parameter in module.parameters()) + buffers + parts.nbytes, weights


def _load(plan: LibraryPlan, progress: Progress | None) -> PreTrainedModel:
    """The model with its weights, in the host's memory. Raises ModelError for tensors that do not fit."""
    total_bytes = sum(entry.nbytes for entry in plan.entries.values())
    reads = Reads(total_bytes, progress)
    held = {name: plan.entries[name] for name in plan.held}
    parts = QuantisedParts(held, plan.dtype, "cpu", rounds_rows=plan.rounds_rows)
    others = {name: entry for name, entry in plan.entries.items() if name not in held}
    tensors = tensors_to_read(others, reads.done)
    with library_errors("load the weights"), sequential_reads():
        load: Any = parts.in_models_of(plan.settings.model_class).from_pretrained
        module, info = load(
            None,
            config=plan.settings.config,
            state_dict=tensors,
            dtype=plan.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_loaded(plan.directory, plan.settings, info)
    assert isinstance(module, PreTrainedModel)
    parts.fill(held, reads.done)
    parts.pack(module)
    if progress is not None:
        progress(total_bytes, total_bytes)
    _warn_of_own_tensors(plan.directory, module)
    return module


def _check_loaded(directory: Path, settings: LibrarySettings, info: Mapping[str, Any]) -> None:
    """Raises ModelError unless tensors of the files and parameters of the model correspond."""
    model = f"this {settings.config.model_type} model"
    if info["mismatched_keys"]:
        name, found, asked = min(info["mismatched_keys"], key=str)
        raise ModelError(
            f"{directory}: tensor {name} has shape {list(found)}, but the config asks for {list(asked)}"
        )
    if info["missing_keys"]:
        raise ModelError(f"{directory}: tensor {_names(info['missing_keys'])} is missing")
    if info["unexpected_keys"]:
        raise ModelError(f"{directory}: tensor {_names(info['unexpected_keys'])} is not part of {model}")
    if info.get("error_msgs") or info.get("conversion_errors"):
        raise ModelError(f"{directory}: tensors could not be converted for {model}")


def _warn_of_own_tensors(directory: Path, module: PreTrainedModel) -> None:
    """Log which tensors are not tied, despite the config, because those in the files differ."""
    wanted: Mapping[str, str] = module.get_expanded_tied_weights_keys(all_submodels=True)
    for name, other in wanted.items():
        if name not in module.all_tied_weights_keys:
            _log.warning(
                "%s: tensor %s differs from %s, so the two are not tied, though tie_word_embeddings says so",
                directory,
                name,
                other,
            )


def _names(names: set[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + more
