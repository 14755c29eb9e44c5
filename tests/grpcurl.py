"""grpcurl, which `make setup` installs where its package has a program for the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

GRPCURL = Path(sys.executable).parent / "grpcurl"
needs_grpcurl = pytest.mark.skipif(
    not GRPCURL.exists(), reason="grpcurl is not installed: its package is for Linux on x86-64 only"
)
