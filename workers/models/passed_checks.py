"""The self-checks of native code that have passed here: a later start of the same code need not repeat them.

Such a check takes longer than all else that a small model needs to be ready, and leaves the transformers
library in memory. It reads no weights, and draws the same random ones each time. So its result is a function
of what is in its key.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch

from kernels.cpu import library
from workers.common.code import worker_code
from workers.models.config import CONFIG_FILE, ModelConfig

# Beside the compiled kernels: it ends with the installation, and who can write there can change those, too.
_DIRECTORY = library.BUILD_DIR / "checks"
# Older ones are removed.
_MOST = 256


def key_of(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> str:
    """What a check depends on, as a digest. The arguments are those of `check_native`. Raises OSError."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    machine = library.kernel_name(), sorted(library.cpu_flags()), gpu
    settings = config, dtype, device.type, batch_invariant
    file = (directory / CONFIG_FILE).read_bytes()
    return hashlib.blake2b(
        repr((worker_code(), machine, settings, file)).encode(), digest_size=16
    ).hexdigest()


def has_passed(key: str) -> bool:
    """Whether it was remembered."""
    return (_DIRECTORY / key).exists()


def remember(key: str) -> None:
    """Keeps it for later starts, unless nothing can be written here."""
    with contextlib.suppress(OSError):
        _DIRECTORY.mkdir(parents=True, exist_ok=True)
        (_DIRECTORY / key).touch()
        kept = sorted(_DIRECTORY.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-_MOST]:
            path.unlink()
