"""A device that fails is reported as lost, by eager steps and by replayed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import quire_command
from tests.gpu.sizes import sized
from tests.kernels.conftest import INTERPRETED
from tests.model_factory import TinyModel, make_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("operation", sized(("prefill", "decode"), ("decode",)))
def test_an_assertion_in_a_kernel_loses_the_device(
    operation: str, tmp_path: Path, device: torch.device
) -> None:
    directory = make_model(tmp_path, TinyModel(head_dim=64))
    command = ["-m", "tests.gpu.lose_device", str(directory), str(device), operation]
    command = quire_command.module(*command[1:]) if INTERPRETED else [sys.executable, *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    # On the CPU, where this is only rehearsed, an index is checked before it is used.
    assert done.stdout.split() == ["DeviceLostError" if device.type == "cuda" else "IndexError"], done.stderr
