"""A fake server for the client, and a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_executor import FakeExecutor, serving
from tests.gateway_process import GatewayProcess


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def target(executor: FakeExecutor) -> Iterator[str]:
    with serving(executor) as address:
        yield address


@pytest.fixture(scope="session")
def gateway() -> Iterator[GatewayProcess]:
    """Serves the weightless executor with one worker, whose answers tests can hold back."""
    with GatewayProcess(model="paged-attention", flags=["--kv-pages", "512"]) as process:
        yield process
