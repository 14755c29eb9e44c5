"""Remembers self-checks of native code that have passed, so that later starts need not repeat them.

A check takes half of a small model's start, and leaves the transformers library in memory. It reads no
weights, and draws the same random ones each time, so its result does not change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from kernels.cpu import library
from kernels.weight_formats import WeightFormat
from workers.common.code import worker_code
from workers.models.config import ModelConfig
from workers.models.source import source_of

# Beside the compiled kernels: removed with the installation, and who can write there can change those, too.
_DIRECTORY = library.BUILD_DIR / "checks"
# The most checks that are remembered. Older ones are removed.
_MOST = 256
# Environment variables that change how torch and the libraries below it compute.
VARIABLES = ("ATEN_", "CUBLAS_", "CUDA_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "DNNL_", "TORCH_", "TRITON_")


def key_of(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    forms: Mapping[str, WeightFormat] = MappingProxyType({}),
    rounds_rows: bool = True,
    *,
    batch_invariant: bool,
) -> str:
    """A digest of everything that a check depends on. Arguments as for `check_native`. Raises ModelError.

    Libraries are identified by their versions.
    """
    gpu = (torch.cuda.get_device_name(device), torch.version.cuda) if device.type == "cuda" else ()
    machine = library.build_name(), sorted(library.cpu_flags()), torch.get_num_threads(), gpu
    environment = sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES))
    settings = (
        config,
        dtype,
        device.type,
        batch_invariant,
        quantization,
        [(name, forms[name].name) for name in sorted(forms)],
        rounds_rows,
    )
    parts = worker_code(), machine, environment, settings, source_of(directory).settings()
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def has_passed(key: str) -> bool:
    """Whether the check with this key has passed before. Raises OSError."""
    return (_DIRECTORY / key).exists()


def remember(key: str) -> None:
    """Notes for later starts that a check has passed. Raises OSError."""
    # Whatever the umask is, no other user can add a passed check.
    _DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    (_DIRECTORY / key).touch()
    for path in sorted(_DIRECTORY.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-_MOST]:
        path.unlink()
