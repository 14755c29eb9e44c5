"""A model with recurrent layers through a gateway, against transformers: any operations, and killed workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.e2e.parity_machine import ParityMachine, assert_greedy_tokens_match, run_parity_machine
from tests.gateway_process import GatewayProcess
from tests.recurrent import RECURRENT
from tests.workers.test_library_model import tiny_model

FLAGS = ["--dtype", "float32", "--kv-pages", "64", "--max-batch-tokens", "48"]


class RecurrentMachine(ParityMachine):
    """Of a model that takes no trees, whose worker is killed now and then."""

    takes_trees = False

    @rule(chance=st.integers(0, 9))
    def kill(self, chance: int) -> None:
        if not chance:
            (worker,) = self.harness.gateway.status().workers
            os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name == "granitemoehybrid" else pytest.mark.thorough)
        for name in RECURRENT
    ],
)
def test_any_sequence_of_operations_matches_transformers(model_type: str, tmp_path: Path) -> None:
    """Their logits, after each: also when a state was lost, and tokens are computed again."""
    model = tmp_path / "model"
    tiny_model(model_type, **RECURRENT[model_type]).save_pretrained(model)
    with GatewayProcess(model=str(model), workers=1, flags=FLAGS) as gateway:
        run_parity_machine(gateway, model, examples=5, steps=20, machine=RecurrentMachine)
        assert_greedy_tokens_match(gateway, model)
