"""Tests for a lent GPU: real sizes, real graphs, the device's own memory.

Without a GPU they are rehearsed, so that no line of them runs there for the first time: small, on the CPU,
with kernels in Triton's interpreter. Those marked `gpu` need the device and are skipped.

The conftest of the kernels' tests decides how kernels run, before they are imported; it is loaded here, since
these tests are collected first.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import HAS_TRITON, INTERPRETED, _launched_as_compiled

__all__ = ["_launched_as_compiled"]  # for every test here, too

if not HAS_TRITON:
    collect_ignore_glob = ["*.py"]


@pytest.fixture
def device() -> torch.device:
    """Where everything runs."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda:0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
