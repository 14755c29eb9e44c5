"""Chooses the backend of a model directory, and loads the model. Also reads its adapters.

"native" is this project's own decoder. "transformers" is the transformers library's code over our pages, for
all other models. With either backend a model is checked before it is served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import torch

from workers.adapters.adapter import Adapter, identity, read_adapter
from workers.adapters.errors import AdapterError
from workers.common.adapter_files import content_digest
from workers.common.draft_models import MTP_HEAD
from workers.common.machine_limits import available_bytes
from workers.executors.memory import LoraLimits
from workers.kv.sizing import KvSizingError
from workers.models import passed_checks
from workers.models.active_kernels import check_cuda_kernels, use_bits_of_all_cpus
from workers.models.adapted import Adapted
from workers.models.check_process import check_apart
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.errors import ModelError, UnsupportedError, without_path
from workers.models.files import errors_naming
from workers.models.model import Model, ModelDescription
from workers.models.model_tensors import check_names
from workers.models.shard import Group, check_split
from workers.models.source import source_of
from workers.models.weights import (
    LoadPlan,
    Progress,
    check_gpu_formats,
    load_planned,
    plan_load,
)
from workers.operations import AdapterSource

_log = logging.getLogger(__name__)

AUTO, NATIVE, TRANSFORMERS = "auto", "native", "transformers"

# How many characters of an error of the transformers library are shown if more text follows.
_MAX_LIBRARY_CHARACTERS = 300
_SEE = "docs/models.md has what is served"
# Part of torch's RuntimeError.
_NO_MEMORY = "can't allocate memory"
# The module of the transformers library with which nearly all comes that a self-check imports.
_HEAVY = "transformers.modeling_utils"


class Choice(NamedTuple):
    """The backend for a directory.

    Attributes:
        backend: "native" or "transformers".
        vocab_size: The size of the model's vocabulary.
        reason: The setting or tensor that native code does not support; "" if it does, or was not asked for.
    """

    backend: str
    vocab_size: int
    reason: str = ""


def choose_backend(directory: Path, asked: str, *, on_cuda: bool = False) -> Choice:
    """The backend for a directory.

    With "auto" it is native code if that supports all settings of the config and all tensors of the files.

    Raises ModelError if config.json cannot be read, has invalid settings, or settings that the requested
    backend does not support.
    """
    reason, library_can_run = "", source_of(directory).library_can_run
    if asked == TRANSFORMERS and not library_can_run:
        raise ModelError(
            f"{directory}: model_backend = transformers runs no model in MXFP4, and GGUF files only of"
            " families without native code"
        )
    if asked != TRANSFORMERS:
        try:
            config = ModelConfig.from_directory(directory)
            if on_cuda:
                check_cuda_kernels(config)
            if asked == AUTO:
                check_names(directory, config)
            return Choice(NATIVE, config.vocab_size)
        except UnsupportedError as error:
            if asked == NATIVE or not library_can_run:
                raise
            reason = without_path(str(error), directory)
            _log.info("trying the transformers backend, since native code cannot run this model: %s", reason)
    # Here and below: the library takes seconds to import, and native code does not need it.
    from workers.models.library.settings import read_settings  # noqa: PLC0415

    try:
        return Choice(TRANSFORMERS, read_settings(directory).vocab_size, reason)
    except ModelError as error:
        raise _explained(error, directory, reason) from error


def check_ranks(directory: Path, choice: Choice, ranks: int) -> None:
    """Raises ModelError for a model that cannot be split over ranks."""
    if choice.backend != NATIVE:
        reason = choice.reason
        raise ModelError(
            f"{directory}: tensor_parallel = {ranks} needs a model that native code runs"
            + (f": {reason}" if reason else "")
        )
    with errors_naming(directory):
        check_split(ModelConfig.from_directory(directory), ranks)


def lacks_on_gpu(directory: Path, asked: str, quantization: str | None = None) -> str:
    """For what of a model there are no GPU kernels; "": nothing, or it cannot be read, as the load will say.

    Only native code may lack some, and what is quantised needs that.
    """
    is_quantised = quantization is not None
    try:
        is_quantised |= any(entry.form is not None for entry in source_of(directory).tensors().values())
        if not is_quantised and asked != NATIVE:
            return ""
        config = ModelConfig.from_directory(directory)
        if is_quantised:
            check_gpu_formats(directory, config, quantization)
    except ModelError as error:
        return "quantised weights" if is_quantised and isinstance(error, UnsupportedError) else ""
    try:
        check_cuda_kernels(config)
    except UnsupportedError:
        return "quantised weights" if is_quantised else "head_dim"
    return ""


def load_served(  # noqa: PLR0913 - the settings of a load
    directory: Path,
    dtype: str,
    device: torch.device,
    progress: Progress | None,
    *,
    backend: str,
    self_check: bool,
    reason: str = "",
    batch_invariant: bool = False,
    pack: bool = True,
    group: Group | None = None,
    quantization: str | None = None,
    rounds_rows: bool = True,
    mtp_head: bool = False,
) -> tuple[Model, ModelDescription]:
    """Load a directory with the backend from `choose_backend`; batch_invariant: for the self-check on a GPU.

    With `pack`, native weights are packed, if there are kernels. With a group a rank's part is loaded.
    With `quantization`, a format, native weights are quantised. `rounds_rows`, `mtp_head`: see `plan_load`.
    Messages have the `reason` of the choice.

    Raises KvSizingError if memory is too small, and ModelError, also if the self-check finds wrong results.
    """
    try:
        if backend == TRANSFORMERS:
            if quantization is not None or mtp_head:
                asked = f"draft_model = {MTP_HEAD}" if mtp_head else "quantization"
                raise UnsupportedError(f"{asked} needs a model that native code runs")
            return _load_library(
                directory, dtype, device, progress, self_check=self_check, rounds_rows=rounds_rows
            )
        plan = plan_load(
            directory, dtype, device, group, quantization, rounds_rows=rounds_rows, mtp_head=mtp_head
        )
        if plan.is_quantised and device.type == "cpu":
            use_bits_of_all_cpus()
        if self_check:
            _check_native(directory, plan, batch_invariant=batch_invariant)
        return load_planned(plan, progress, pack=pack)
    except KvSizingError as error:
        if str(directory) in str(error):
            raise
        raise KvSizingError(f"{directory}: {error}") from error
    except (ModelError, MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            raise KvSizingError(
                f"{directory}: memory ran out while the model was loaded, and {available_bytes() >> 20} MiB"
                " are free: this process may have less than the machine (ulimit -v)"
            ) from error
        if not isinstance(error, ModelError):
            raise
        raise _explained(error, directory, reason) from error


def read_source(source: AdapterSource, model: Adapted, limits: LoraLimits) -> Adapter:
    """Read an adapter; see `read_adapter`. Raises AdapterError, also for other files than were found."""
    directory = Path(source.directory)
    adapter = read_adapter(directory, model.adaptable(), max_rank=limits.max_rank, max_bytes=limits.max_bytes)
    if source.digest:
        try:
            digest = content_digest(directory)
        except OSError as error:
            raise AdapterError(f"cannot be read: {error.strerror}") from error
        if digest != source.digest or identity(directory) != adapter.identity:
            raise AdapterError("the files of the adapter have changed since it was found")
    return adapter


def _explained(error: ModelError, directory: Path, reason: str) -> ModelError:
    """The error with the directory, and after an error of the library with the reason against native code.

    The library's own message may be as short as "KeyError".
    """
    text = str(error) if str(directory) in str(error) else f"{directory}: {error}"
    if not reason or reason in without_path(text, directory):
        return ModelError(text)
    # The library's message may be long.
    return ModelError(f"{text[:_MAX_LIBRARY_CHARACTERS]}; and native code: {reason}; {_SEE}")


def _check_native(directory: Path, plan: LoadPlan, *, batch_invariant: bool) -> None:
    """Raises ModelError if native code and the library disagree for this config."""
    # The library has no heads for multi-token prediction.
    checked = directory, plan.config.body, plan.dtype, plan.device
    quantised = plan.quantization, dict(plan.forms), plan.rounds_rows

    def key() -> str:
        return passed_checks.key_of(*checked, *quantised, batch_invariant=batch_invariant)

    before = ""
    with contextlib.suppress(OSError):
        before = key()
        if passed_checks.has_passed(before):
            _log.info("native code agreed with the transformers library in an earlier start")
            return
    try:
        # Where the library was imported before, a process of its own would save nothing. A GPU may be limited
        # to one process.
        if plan.device.type == "cpu" and _HEAVY not in sys.modules:
            error = check_apart(*checked, *quantised)
        else:
            from workers.models.native_parity_check import check_native  # noqa: PLC0415

            error = check_native(*checked, *quantised, batch_invariant=batch_invariant)
    except ImportError as why:
        _log.warning("the model is not checked: the transformers library cannot be imported: %s", why)
        return
    if error is None:
        _log.warning("even the scaled-down model is too large, so native code is not checked")
    else:
        with contextlib.suppress(OSError):
            # Not if files were replaced meanwhile: the code that was checked may be the older one.
            if key() == before:
                passed_checks.remember(before)
        _log.info("native code agrees with the transformers library, within %.1e", error)


def _load_library(
    directory: Path,
    dtype: str,
    device: torch.device,
    progress: Progress | None,
    *,
    self_check: bool,
    rounds_rows: bool,
) -> tuple[Model, ModelDescription]:
    from workers.models.library.loading import load_library_model, plan_library_model  # noqa: PLC0415
    from workers.models.library.parity_check import check_loaded, check_scaled_down  # noqa: PLC0415

    plan = plan_library_model(directory, dtype, device, rounds_rows=rounds_rows)
    if self_check:
        # Before the weights are loaded, which takes longer: a scaled-down model shows most problems.
        check_scaled_down(directory, plan.settings)
    model, description = load_library_model(plan, progress)
    if self_check:
        check_loaded(directory, model, description)
    return model, description


def check_same_config(
    model: Model, served: ModelDescription, other_model: Model, other: ModelDescription, free: Container[str]
) -> None:
    """Raises ModelError unless other weights fit into the place of those that are served.

    `free` has the fields of a native model's config that may differ.
    """
    if isinstance(model, Decoder) and isinstance(other_model, Decoder):
        configs = dataclasses.asdict(model.config), dataclasses.asdict(other_model.config)
        differing = [name for name in configs[0] if name not in free and configs[0][name] != configs[1][name]]
        if differing:
            raise ModelError(
                f"the config differs from that of the weights that are served: {', '.join(differing)}"
            )
    names = {field.name for field in dataclasses.fields(ModelDescription)} - {"model_id", "fingerprint"}
    # The bytes last: they differ because something else does.
    for name in sorted(names, key=lambda name: (name == "weight_bytes", name)):
        ours, theirs = getattr(served, name), getattr(other, name)
        if ours != theirs:
            raise ModelError(f"{name} is {theirs}, and that of the served weights is {ours}")
