"""Which code a worker runs: another digest may compute other results."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from importlib import metadata
from pathlib import Path

# In the repository, or where they are installed.
_ROOT = Path(__file__).parents[2]
_DIRECTORIES = ("workers", "kernels")
_SUFFIXES = frozenset((".py", ".cpp", ".h"))
_LIBRARIES = ("torch", "transformers", "triton")


def worker_code(root: Path = _ROOT) -> str:
    """Digest of the sources of workers and kernels and of their libraries. Raises OSError."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for library in _LIBRARIES:
        version = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(library)
        digest.update(f"{library} {version}\n".encode())
    for path in sorted(path for name in _DIRECTORIES for path in (root / name).rglob("*")):
        if path.suffix in _SUFFIXES:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
