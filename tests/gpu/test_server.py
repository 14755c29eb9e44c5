"""A whole server with its worker on the device: its tokens are those of transformers; faults lose none."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.gpu.oracle import Oracle
from tests.gpu.sizes import sized
from tests.gpu.test_executor import random_tokens
from tests.gpu.uninstalled import make_runnable
from tests.kernels.conftest import INTERPRETED
from tests.model_factory import TinyModel, make_model

# A width of heads that there are CUDA kernels for.
MODEL = TinyModel(head_dim=64)
TOKENS = sized(64, 6)


@pytest.fixture
def on_device(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a server there. Skips where packages are not installed that only a server needs."""
    for name in ("grpc", "structlog", "uvloop", "llguidance", "httpx2", "h11"):
        pytest.importorskip(name)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # restored after the test
    monkeypatch.syspath_prepend(tmp_path)
    make_runnable(tmp_path / "metadata")
    # Few rows, for which graphs are captured in little time.
    flags = ["--max-batch-items", "8", "--max-batch-tokens", "256", "--batch-invariant"]
    return [*flags, "--device", device.type, "--dtype", "float32"]


def test_decodes_through_a_server_are_those_of_transformers(
    tmp_path: Path, device: torch.device, on_device: list[str]
) -> None:
    from quire.v1 import executor_pb2

    from tests.gateway_process import GatewayProcess

    directory = make_model(tmp_path / "model", MODEL)
    prompts = [[token % MODEL.vocab_size for token in random_tokens(seed, 5 + 9 * seed)] for seed in range(3)]
    flags = [*on_device, "--kv-pages", "128"]
    with GatewayProcess(
        model=str(directory), flags=flags, self_check=not INTERPRETED, forks=INTERPRETED
    ) as gateway:
        answers = [gateway.prefill(prompt) for prompt in prompts]
        texts = [[answer.output.token_id] for answer in answers]
        while len(texts[0]) < TOKENS:
            items = [
                executor_pb2.DecodeRequest(cache_id=answer.kv_cache.cache_id, token_id=text[-1])
                for answer, text in zip(answers, texts, strict=True)
            ]
            response = gateway.stub.BatchDecode(executor_pb2.BatchDecodeRequest(items=items))
            for text, result in zip(texts, response.results, strict=True):
                text.append(result.response.output.token_id)
    oracle = Oracle(directory, device)
    assert texts == [oracle.greedy(prompt, TOKENS) for prompt in prompts]


def test_any_sequence_of_operations_matches_transformers(tmp_path: Path, on_device: list[str]) -> None:
    """As `tests/e2e/test_parity_machine.py` has it, with pages so few that they are given to others."""
    pytest.importorskip("hypothesis")
    from tests.e2e.parity_machine import run_parity_machine
    from tests.gateway_process import GatewayProcess

    model = make_model(tmp_path / "model", MODEL)
    flags = [*(flag for flag in on_device if flag != "--batch-invariant"), "--kv-pages", "96"]
    with GatewayProcess(model=str(model), flags=flags, forks=INTERPRETED) as gateway:
        run_parity_machine(gateway, model, examples=sized(40, 1), steps=sized(30, 20))


@pytest.mark.gpu
def test_faults_lose_nothing(tmp_path: Path, on_device: list[str]) -> None:
    """Workers that are killed come back with nothing on the device; their texts are replayed there."""
    from tests.soak.__main__ import soak
    from tests.soak.options import TINY

    options = Namespace(
        model=TINY, faults=5, minutes=0.7, seed=7, callers=4, texts=4, workers=1, kv_pages=40, interval_s=1.0
    )
    # The first steps of a worker compile, and answer no heartbeats then.
    flags = [*on_device, "--heartbeat-timeout-s", "10"]
    tally = asyncio.run(soak(options, tmp_path, more_flags=flags, spec=MODEL))
    assert tally.is_clean(), tally.details
    assert tally.num_faults and tally.sequences
