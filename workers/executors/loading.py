"""Which code runs a model directory, and what an executor has to know of the model it gets.

"native": this project's own decoder. "transformers": the transformers library's code over our pages, for all
others. A model proves itself before it serves, whichever runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.executors.describe import kv_layers
from workers.executors.info import DescribedConfig
from workers.kv.sizing import KvSizingError, available_bytes
from workers.kv.tensors import LayerKv
from workers.models.active_kernels import check_cuda_kernels
from workers.models.config import CONFIG_FILE, ModelConfig
from workers.models.errors import ModelError, UnsupportedError
from workers.models.model import Model
from workers.models.weights import LoadPlan, load_planned, plan_load

_log = logging.getLogger(__name__)

AUTO, NATIVE, TRANSFORMERS = "auto", "native", "transformers"

# How errors of the transformers library begin, and so much of them is shown where there is more to say.
_LIBRARY_CANNOT, _MOST_OF_LIBRARY = "the transformers library cannot ", 300
# What torch says in a RuntimeError.
_NO_MEMORY = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, whoever runs it.

    Attributes:
        backend: "native" or "transformers".
        layers: The shape of its pages.
        rotation_bytes: What it keeps for each position that fits into pages, made with the first step.
        graphable: Its decodes may be captured as CUDA graphs.
        takes_trees: It attends token trees.
    """

    model: Model
    backend: str
    layers: tuple[LayerKv, ...]
    rotation_bytes: int
    dtype: torch.dtype
    device: torch.device
    config: DescribedConfig
    fingerprint: str
    num_parameters: int
    weight_bytes: int
    graphable: bool
    takes_trees: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What the config of a directory decides.

    Attributes:
        backend: "native" or "transformers".
        vocab_size: Tokens that the model knows.
    """

    backend: str
    vocab_size: int


def choose_backend(directory: Path, asked: str, *, on_cuda: bool = False) -> Choice:
    """The backend that runs a directory: with "auto" native code, where there is some for all it asks for.

    Raises:
        ModelError: There is no config.json that can be read, a setting of it makes no sense, or it asks for
            what the backend that is asked for does not have.
    """
    if asked != TRANSFORMERS:
        try:
            config = ModelConfig.from_directory(directory)
            if on_cuda:
                check_cuda_kernels(config.head_dim)
            return Choice(NATIVE, config.vocab_size)
        except UnsupportedError as error:
            if asked == NATIVE:
                raise
            _log.info("trying the transformers backend, since native code cannot run this model: %s", error)
    # The library takes seconds to import, for nothing where native code runs.
    from workers.models.library.settings import read_settings  # noqa: PLC0415

    try:
        return Choice(TRANSFORMERS, read_settings(directory).vocab_size)
    except ModelError as error:
        raise _explained(error, directory) from error


def runs_on_cuda(directory: Path, asked: str) -> bool:
    """Whether a CUDA device can run a directory's model: always, but for native code without kernels for it.

    Raises ModelError if native code is asked for and the config cannot be read.
    """
    try:
        if asked == NATIVE:
            choose_backend(directory, asked, on_cuda=True)
    except UnsupportedError:
        return False
    return True


def load_served(
    directory: Path,
    dtype: str,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    *,
    backend: str,
    self_check: bool,
) -> ServedModel:
    """Load a directory with a backend that `choose_backend` gave.

    Raises ModelError and KvSizingError, the former also if the model does not compute what it should.
    """
    try:
        if backend == TRANSFORMERS:
            return _load_library(directory, dtype, device, progress, self_check=self_check)
        return _load_native(directory, dtype, device, progress, self_check=self_check)
    except (ModelError, MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            raise KvSizingError(
                f"{directory}: memory ran out while the model was loaded, and {available_bytes() >> 20} MiB"
                " are free: this process may have less than the machine (ulimit -v)"
            ) from error
        if not isinstance(error, ModelError):
            raise
        raise _explained(error, directory) from error


def _explained(error: ModelError, directory: Path) -> ModelError:
    """The error with the directory; and, where the library stumbled, with the setting that native code lacks.

    All that the library says of a setting may be "KeyError".
    """
    said = str(error) if str(directory) in str(error) else f"{directory}: {error}"
    lack = _native_lacks(directory) if _LIBRARY_CANNOT in said else ""
    # Behind what the library says, which may be long.
    return ModelError(f"{said[:_MOST_OF_LIBRARY]}; and native code: {lack}" if lack else said)


def _native_lacks(directory: Path) -> str:
    """What native code says of the config of a family that it has; "" where that is nothing."""
    try:
        ModelConfig.from_directory(directory)
    except ModelError as error:
        lack = str(error).removeprefix(f"{directory}/")
        return "" if lack.startswith(f"{CONFIG_FILE}: model_type: ") else lack
    return ""


def _load_native(
    directory: Path,
    dtype: str,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    *,
    self_check: bool,
) -> ServedModel:
    plan = plan_load(directory, dtype, device)
    if self_check:
        _prove_native(directory, plan)
    loaded = load_planned(plan, progress, pack=True)
    return ServedModel(
        model=loaded.decoder,
        backend=NATIVE,
        layers=kv_layers(loaded.config),
        rotation_bytes=len(loaded.config.ropes) * loaded.config.rotary_dim * torch.float32.itemsize,
        dtype=loaded.decoder.dtype,
        device=loaded.decoder.device,
        config=loaded.config,
        fingerprint=loaded.fingerprint,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        graphable=True,
        takes_trees=True,
    )


def _prove_native(directory: Path, plan: LoadPlan) -> None:
    """Raises ModelError if native code computes something else for this config than the library."""
    try:
        # The library takes seconds to import.
        from workers.models.native_proof import prove_native  # noqa: PLC0415
    except ImportError:
        _log.warning("the model is not checked: the transformers library is not installed")
        return
    error = prove_native(directory, plan.config, plan.dtype, plan.device)
    if error is not None:
        _log.info("native code agrees with the transformers library, within %.1e", error)


def _load_library(
    directory: Path,
    dtype: str,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    *,
    self_check: bool,
) -> ServedModel:
    # The library takes seconds to import, for nothing where native code runs.
    from workers.models.library.loading import load_library_model, plan_library_model  # noqa: PLC0415
    from workers.models.library.proof import prove_copy, prove_loaded  # noqa: PLC0415

    plan = plan_library_model(directory, dtype, device)
    if self_check:
        # Before the weights, which take longer: most that cannot be served shows in a small copy.
        prove_copy(directory, plan.settings)
    loaded = load_library_model(plan, progress)
    if self_check:
        prove_loaded(directory, loaded)
    return ServedModel(
        model=loaded.model,
        backend=TRANSFORMERS,
        layers=loaded.model.layers,
        rotation_bytes=0,  # the library computes them anew in each step
        dtype=loaded.model.dtype,
        device=loaded.model.device,
        config=loaded.config,
        fingerprint=loaded.fingerprint,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        graphable=False,
        takes_trees=loaded.model.takes_trees,
    )
