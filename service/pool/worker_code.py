"""Digest of what a new worker would run: the sources of workers and kernels, and libraries they compute with.

Outside of its responsibility: the protocol, which `registry.py` compares.
"""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_DIRECTORIES = ("workers", "kernels")
_SUFFIXES = frozenset((".py", ".cpp", ".h"))
_LIBRARIES = ("torch", "transformers", "triton")


def worker_code(root: Path = _ROOT) -> str:
    """Reads about 1 MB. Raises OSError."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for library in _LIBRARIES:
        digest.update(f"{library} {_version(library)}\n".encode())
    files = (path for name in _DIRECTORIES for path in (root / name).rglob("*") if path.suffix in _SUFFIXES)
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
