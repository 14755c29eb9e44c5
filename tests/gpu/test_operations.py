"""Random sequences of an executor's operations on the device, against transformers there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model_factory import make_model


def test_any_sequence_of_operations_matches_transformers(tmp_path: Path, device: torch.device) -> None:
    pytest.importorskip("hypothesis")
    from tests.gpu import operations_machine

    operations_machine.run(make_model(tmp_path, operations_machine.MODEL), device)
