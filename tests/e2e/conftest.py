"""Gateways shared by the tests of this folder. Each has two workers: sharding is part of what is tested."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.conftest import shared
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model

# The references run beside servers and other tests, where more threads wait for one another.
torch.set_num_threads(1)

NewCache = Callable[[Sequence[int]], str]


@pytest.fixture
def home() -> Iterator[Path]:
    """For a data directory."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one config with different weights, and one with another head width. Read-only."""
    directory = tmp_path_factory.mktemp("models")
    same = [make_model(directory / f"{seed}", TinyModel(seed=seed)) for seed in range(3)]
    return [*same, make_model(directory / "other", TinyModel(head_dim=48))]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with grouped heads, an odd head width and an untied head, in shards."""
    spec = TinyModel(head_dim=80, heads=4, kv_heads=2, tied=False, max_shard_bytes=100_000)
    return make_model(tmp_path_factory.mktemp("tiny"), spec)


@pytest.fixture(scope="session")
def tiny_gateway(tiny_model: Path) -> Iterator[GatewayProcess]:
    """Serves the tiny model in float32, in small steps: prompts run in chunks. It drafts for itself."""
    flags = ["--dtype", "float32", "--kv-pages", "256", "--max-batch-tokens", "48"]
    flags += ["--draft-model", str(tiny_model)]
    with shared("tiny_gateway", GatewayProcess(model=str(tiny_model), workers=2, flags=flags)) as gateway:
        yield gateway


@pytest.fixture
def new_cache(tiny_gateway: GatewayProcess) -> Iterator[NewCache]:
    """Makes caches of prompts. They are released: others look whether the gateway's pools are empty."""
    made = []

    def make(prompt: Sequence[int]) -> str:
        answer = tiny_gateway.prefill(prompt)
        made.append(answer.kv_cache.cache_id)
        return made[-1]

    yield make
    for cache_id in made:
        tiny_gateway.release(cache_id)


@pytest.fixture(scope="session")
def weightless_gateway() -> Iterator[GatewayProcess]:
    """Serves the weightless executor from small pools, so that they can be exhausted."""
    flags = ["--kv-pages", "64", "--max-request-bytes", "262144", "--max-response-bytes", "524288"]
    served = GatewayProcess(model="paged-attention", workers=2, flags=flags)
    with shared("weightless_gateway", served) as gateway:
        yield gateway
