"""Ceilings: what a Decode may go through, and what a token may cost.

Whoever makes one of these smaller lowers its ceiling. `make size` shows what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.size.calls import ITEMS, ROLES, CountedServer, decodes, most_called
from benchmarks.size.way import TYPES, Way, way_of
from tests.gateway_process import GatewayProcess

FILES_ON_THE_WAY = 18
TYPES_ON_THE_WAY = 12
TYPES_AROUND = 3
# Counted with Python 3.11. Others count a little differently: 3.12, for one, calls no function for a
# comprehension.
CALLS: dict[str, dict[str, float]] = {
    f"item of a BatchDecode of {ITEMS}": {"gateway": 18.7, "worker": 5.4},
    "unary Decode": {"gateway": 114, "worker": 114},
    "Decode on a Session": {"gateway": 121, "worker": 113},
}
# The same with `--metrics-listen`.
CALLS_WITH_METRICS = {
    f"item of a BatchDecode of {ITEMS}": 22.0,
    "unary Decode": 127,
    "Decode on a Session": 132,
}
# The same with `--otlp-endpoint`, of calls that are recorded and of those that are not, by the sampler.
CALLS_WITH_TRACES = {
    "always_on": {
        f"item of a BatchDecode of {ITEMS}": 22.2,
        "unary Decode": 201,
        "Decode on a Session": 127,
    },
    "always_off": {
        f"item of a BatchDecode of {ITEMS}": 20.7,
        "unary Decode": 151,
        "Decode on a Session": 126,
    },
}
SLACK = 1.01
SHOWN = 15

Kinds = dict[str, tuple[Callable[[], object], int]]


@pytest.fixture(scope="module")
def server() -> Iterator[CountedServer]:
    with CountedServer(program=GatewayProcess) as server:
        yield server


@pytest.fixture(scope="module")
def kinds(server: CountedServer) -> Iterator[Kinds]:
    with decodes(server) as kinds:
        yield kinds


@pytest.fixture(scope="module")
def way(server: CountedServer, kinds: Kinds) -> Way:
    return way_of(server.uses(kinds["unary Decode"][0]))


@pytest.mark.parametrize("kind", CALLS)
def test_a_token_costs_no_more_calls(server: CountedServer, kinds: Kinds, kind: str) -> None:
    step, tokens = kinds[kind]
    calls = server.calls_per_step(step)
    for role in ROLES:
        found, most = calls[role].total() / tokens, CALLS[kind][role]
        message = (
            f"{kind}: the {role} calls {found:.1f} Python functions, {most} or about so many at most. Compare"
            " with the commit before: make size ARGS='--functions 100'. Called most often:"
        )
        assert 0 < found <= most * SLACK, "\n".join([message, *most_called(calls[role], tokens, SHOWN)])


def test_metrics_cost_few_calls() -> None:
    flags = ["--metrics-listen", "127.0.0.1:0"]
    with CountedServer(*flags, program=GatewayProcess) as server, decodes(server) as kinds:
        for kind, (step, tokens) in kinds.items():
            found = server.calls_per_step(step)["gateway"]
            counted = sum(calls for name, calls in found.items() if "/service/extensions/metrics/" in name)
            assert counted, "metrics are counted"
            assert found.total() / tokens <= CALLS_WITH_METRICS[kind] * SLACK, kind


@pytest.mark.parametrize("sampler", CALLS_WITH_TRACES)
def test_traces_cost_few_calls(monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    # Nothing listens there, and exports are rare enough not to count.
    flags = ["--otlp-endpoint", "http://127.0.0.1:9"]
    with CountedServer(*flags, program=GatewayProcess) as server, decodes(server) as kinds:
        for kind, (step, tokens) in kinds.items():
            found = server.calls_per_step(step)["gateway"]
            assert found.total() / tokens <= CALLS_WITH_TRACES[sampler][kind] * SLACK, kind


def test_a_decode_goes_through_no_more_files(way: Way) -> None:
    assert len(way.files) <= FILES_ON_THE_WAY, "\n".join(way.files)


def test_a_decode_takes_no_more_types(way: Way) -> None:
    assert len(way.types) <= TYPES_ON_THE_WAY
    assert len(way.other_types) <= TYPES_AROUND, "\n".join(sorted(way.other_types))


def test_the_types_that_are_looked_for_are_met(way: Way) -> None:
    assert set(TYPES) == way.types
