"""The trainer of the recipes learns from rollouts that a server draws with the weights it has pushed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from quire import Client
from quire.v1 import executor_pb2

from tests.client.pages import run_python
from tests.gateway_process import ROOT, GatewayProcess

# Threads of torch that wait for each other spin, and what is computed here is small.
torch.set_num_threads(1)

RECIPE = ROOT / "clients" / "python" / "examples" / "trainer" / "train_policy.py"
SHIPPED = ROOT / "workers" / "models" / "adder"
STEPS, GROUP = 6, 16


def train(gateway: GatewayProcess, *arguments: str) -> list[dict[str, Any]]:
    """The figures of each step."""
    printed = run_python(RECIPE, gateway.address, "--steps", str(STEPS), "--group", str(GROUP), *arguments)
    return [json.loads(line) for line in printed.splitlines()]


# That adapters are pushed and served is in tests/e2e/test_adapters.py, and their numbers in
# tests/workers/test_lora_model.py.
@pytest.mark.parametrize(
    ("dtype", "arguments"),
    [("float32", []), pytest.param("bfloat16", ["--lora"], marks=pytest.mark.thorough)],
)
def test_the_reward_rises_and_no_token_is_stale(dtype: str, arguments: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "steps.svg"
    with GatewayProcess(model=str(SHIPPED), flags=["--dtype", dtype]) as gateway:
        steps = train(gateway, *arguments, "--chart", str(picture))
        with Client(gateway.address) as client:
            assert not client.stub.ListCaches(executor_pb2.ListCachesRequest()).kv_caches
    assert len(steps) == STEPS
    assert sum(step["stale_tokens"] for step in steps) == 0
    rewards = [step["reward"] for step in steps]
    # Chance is 1/16 at random weights; a step has 1,280 tokens.
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.05, rewards
    for step in steps:
        found = step["logprob_differences"]
        # Sums of float32 in another order. The server's bfloat16 rounds as often as the trainer's does.
        assert found["mean"] < 2 * found["mean_of_rounding"] + 1e-5, step
    assert picture.read_text(encoding="utf-8").startswith("<svg ")
