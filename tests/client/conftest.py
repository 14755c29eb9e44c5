"""A fake server for the client, and a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from quire.cli.main import main

from tests.e2e.unharmed import release_all
from tests.fake_executor import FakeExecutor, serving
from tests.gateway_process import GatewayProcess


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def target(executor: FakeExecutor) -> Iterator[str]:
    with serving(executor) as address:
        yield address


class Printed(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Quire = Callable[..., Printed]


@pytest.fixture
def quire(target: str, capsys: pytest.CaptureFixture[str]) -> Quire:
    """The command line, which asks the fake server."""

    def run(*arguments: str) -> Printed:
        status = main([*arguments, "--target", target])
        return Printed(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def gateway() -> Iterator[GatewayProcess]:
    """Serves the weightless executor with one worker, whose answers tests can hold back."""
    with GatewayProcess(model="paged-attention", flags=["--kv-pages", "512"]) as process:
        yield process


@pytest.fixture
def nothing_is_left(gateway: GatewayProcess) -> Iterator[None]:
    """Nothing is in flight any more, and when all caches are released nothing is held."""
    yield
    gateway.wait_until(lambda: gateway.status().operations_in_flight == 0)
    release_all(gateway)
    gateway.assert_pools_are_whole()
