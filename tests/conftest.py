"""For every test: draws that are its own. For some: a server that they share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import random
import re
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gateway_process import GatewayProcess

try:
    import hypothesis.core
    from hypothesis import settings
except ModuleNotFoundError:
    # On a machine for the GPU suite.
    pass
else:
    # Nothing timed decides; the same examples whatever has run before, the first of which find the most.
    settings.register_profile("quire", deadline=None, derandomize=True, database=None, max_examples=30)
    settings.register_profile(
        "explore", settings.get_profile("quire"), derandomize=False, max_examples=300, print_blob=True
    )
    settings.register_profile("thorough", settings.get_profile("quire"), max_examples=300)
    settings.load_profile("quire")


# In the environment: see `GatewayProcess`.
AS_SHIPPED = "QUIRE_TESTS_AS_SHIPPED"
# What a machine may lack, with what tests say that are skipped without it.
REQUIRED = {
    "grpcurl": "grpcurl is not installed",
    "kubectl": "needs kubectl",
    "manual": "`make docs` installs",
    "namespaces": "network namespaces",
    "node": "no node|node is|npm cannot fetch",
    "postgresql": "initdb of PostgreSQL",
    "sbom": "`make sbom` installs",
    "wheels": "`make dist` installs|needs a registry of packages",
}


# The background job of a shell ignores it, and so would each program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test ARGS=--thorough`: also what takes minutes more and seldom tells more."""
    parser.addoption("--thorough", action="store_true", help="try every mistake and every family end to end")
    parser.addoption("--explore", type=int, metavar="SEED", help="other draws than in every run; and more")
    parser.addoption(
        "--as-shipped", action="store_true", help="start servers as users do: slower, not forked"
    )
    parser.addoption(
        "--require",
        action="extend",
        type=lambda names: names.split(","),
        default=[],
        metavar="NAME,...",
        help=f"fail where a test is skipped for want of one: {', '.join(REQUIRED)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """More examples, or others, if they are asked for."""
    if unknown := set(config.getoption("--require")) - set(REQUIRED):
        raise pytest.UsageError(f"--require: {', '.join(sorted(unknown))} is none of {', '.join(REQUIRED)}")
    if config.getoption("--as-shipped"):
        os.environ[AS_SHIPPED] = "1"
    elif config.getoption("numprocesses", None):
        # Here are the processes that fork for all of pytest's.
        from tests.forks import for_others

        os.environ.update(for_others())
    if "hypothesis" not in sys.modules:
        return
    seed = config.getoption("--explore")
    if seed is not None:
        settings.load_profile("explore")
        # As --hypothesis-seed does.
        hypothesis.core.global_force_seed = seed
    elif config.getoption("--thorough"):
        settings.load_profile("thorough")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped for want of what is required fails."""
    report = yield
    return without_what_is_required(item.config.getoption("--require"), report)


def without_what_is_required(names: list[str], report: pytest.TestReport) -> pytest.TestReport:
    """A report of a test that was skipped for want of one of `names` becomes that of a failure."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        for name in names:
            if re.search(REQUIRED[name], reason):
                report.outcome, report.longrepr = "failed", f"{name} is required: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay, so no garbage is looked for among them: that took a twentieth of a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Seldom: most of what tests make is freed without.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked as thorough, unless it is asked for."""
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.fixture(autouse=True)
def _own_draws(request: pytest.FixtureRequest) -> None:
    """Seed what draws without a generator by the test's name: the same draws whatever has run before."""
    explored = request.config.getoption("--explore")
    name = request.node.nodeid if explored is None else f"{request.node.nodeid} {explored}"
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    # Not imported for tests that do without.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)
    if torch := sys.modules.get("torch"):
        # Not torch.manual_seed: for devices that are not in use it keeps each call, with its stack.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run tests that are coroutines on a machine without pytest-asyncio. Their fixtures are none."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.config.pluginmanager.hasplugin(
        "asyncio"
    ):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# By the fixture that all tests of a run share.
_SHARED: dict[str, GatewayProcess] = {}


@contextlib.contextmanager
def shared(fixture: str, gateway: GatewayProcess) -> Iterator[GatewayProcess]:
    """Starts a gateway, which rests while tests run that do without: idle it takes a fortieth of a core."""
    with gateway:
        _SHARED[fixture] = gateway
        yield gateway
        gateway.process.send_signal(signal.SIGCONT)
        del _SHARED[fixture]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test begins with one thread of torch, whatever ran before: there is a process for each core.

    For gateways see `shared`.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for fixture, gateway in _SHARED.items():
        is_used = fixture in getattr(item, "fixturenames", ())
        gateway.process.send_signal(signal.SIGCONT if is_used else signal.SIGSTOP)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Fixtures of a module, which end with its last test, may use one that this test does without."""
    if nextitem is None or nextitem.path != item.path:
        for gateway in _SHARED.values():
            gateway.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def shipped_gateway() -> Iterator[GatewayProcess]:
    """Serves the shipped model. A test leaves no caches behind."""
    # Not imported on a machine for the GPU suite.
    from tests.gateway_process import GatewayProcess

    with shared("shipped_gateway", GatewayProcess(model="adder", workers=2)) as gateway:
        yield gateway
