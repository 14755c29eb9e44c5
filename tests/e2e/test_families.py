"""Families through a real gateway, against transformers: any operations, and 64 greedy tokens.

With --thorough. In every run: all of them in a worker, in tests/workers/test_families.py; Qwen3 and experts
through a gateway, in test_parity_machine.py and test_same_bits.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.parity_machine import ParityMachine, assert_greedy_tokens_match, run_parity_machine
from tests.e2e.test_recurrent import RecurrentMachine
from tests.families import MODELS, WITHOUT_STATES, settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import make_family_model

FLAGS = ["--dtype", "float32", "--kv-pages", "256", "--max-batch-tokens", "48"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_family(name: str, tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", *settings_of(name), seed=3)
    with GatewayProcess(model=str(model), workers=1, flags=FLAGS) as gateway:
        machine = ParityMachine if name in WITHOUT_STATES else RecurrentMachine
        run_parity_machine(gateway, model, examples=3, steps=12, machine=machine)
        assert_greedy_tokens_match(gateway, model)
