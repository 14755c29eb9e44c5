"""Random sequences of operations through a real gateway with two workers, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.parity_machine import run_parity_machine
from tests.gateway_process import GatewayProcess


# A few find nearly what all do; test_same_bits.py runs the same operations.
@pytest.mark.parametrize("examples", [6, pytest.param(60, marks=pytest.mark.thorough)])
def test_any_sequence_of_operations_matches_transformers(
    tiny_gateway: GatewayProcess, tiny_model: Path, examples: int
) -> None:
    run_parity_machine(tiny_gateway, tiny_model, examples=examples, steps=30)
