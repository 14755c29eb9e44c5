"""Families through a real gateway, against transformers: any operations, and 64 greedy tokens.

With --thorough. In every run: all of them in a worker, in tests/workers/test_families.py; Qwen3 and experts
through a gateway, in test_parity_machine.py and test_same_bits.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.parity_machine import (
    LAYER,
    MAX_RELATIVE_ERROR,
    ParityMachine,
    assert_greedy_tokens_match,
    run_parity_machine,
)
from tests.e2e.test_recurrent import RecurrentMachine
from tests.families import MODELS, WITHOUT_STATES, settings_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import float32_losses, hf_model, make_family_model
from tests.workers.packing import random_texts

FLAGS = ["--dtype", "float32", "--kv-pages", "256", "--max-batch-tokens", "48"]


def float32_error(model: Path) -> float:
    """What float32 loses of the rows that are compared, relative to their largest element."""
    module, texts = hf_model(model), random_texts(1, (40, 40))
    losses = float32_losses(module, texts)  # [texts, layers + 2]
    with torch.inference_mode():
        exact = module(torch.tensor(texts), use_cache=False, output_hidden_states=True)
    rows = {LAYER: exact.hidden_states[LAYER], -1: exact.logits}
    return max(
        float((losses[:, layer] / states.abs().amax(2).amin(1)).max()) for layer, states in rows.items()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_family(name: str, tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", *settings_of(name), seed=3)
    with GatewayProcess(model=str(model), workers=1, flags=FLAGS) as gateway:
        machine = ParityMachine if name in WITHOUT_STATES else RecurrentMachine
        bound = max(MAX_RELATIVE_ERROR, float32_error(model))
        run_parity_machine(gateway, model, examples=3, steps=12, machine=machine, max_error=bound)
        assert_greedy_tokens_match(gateway, model)
