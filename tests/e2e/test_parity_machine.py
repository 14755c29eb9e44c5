"""Random sequences of operations through a real gateway with two workers, against transformers."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.parity_machine import assert_greedy_tokens_match, run_parity_machine
from tests.gateway_process import GatewayProcess


def test_any_sequence_of_operations_matches_transformers(
    tiny_gateway: GatewayProcess, tiny_model: Path
) -> None:
    run_parity_machine(tiny_gateway, tiny_model, examples=40, steps=30)


def test_64_greedy_tokens_match_transformers(tiny_gateway: GatewayProcess, tiny_model: Path) -> None:
    assert_greedy_tokens_match(tiny_gateway, tiny_model)
