"""One rule for all that is made under request ids: creations of caches, forks, and executions."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from service.caches.idempotency import IdempotencyTable, Kind
from service.caches.requests import Fork
from service.caches.tenants import Tenant
from service.errors import InvalidArgument, QuireError
from tests.service.runtimes.fake_runtime import FakeRuntime
from tests.service.runtimes.test_executions import executions_with, request
from tests.sim.harness import Gateway, prefill

ALICE = Tenant("alice")
KINDS = list(Kind)


class Server:
    """A gateway with executions: makes something under an id, of each kind."""

    def __init__(self) -> None:
        self.gateway = Gateway()
        self.idempotency = self.gateway.machine.index.idempotency
        self.executions = executions_with(self.idempotency, FakeRuntime("local"))
        self.parent = self.gateway.create(1, 2)

    def make(self, kind: Kind, request_id: str, *, other: bool = False) -> object:
        """What a caller gets: what names what was made. `other`: of a request that is not the same."""
        if kind is Kind.CREATION:
            return self.gateway.append(prefill(5 + other, request_id=request_id)).cache_id
        if kind is Kind.FORK:
            children = self.gateway.handles(Fork.of(self.parent, 2 + other, (), request_id)).handles
            return [child.cache_id for child in children]
        return self.executions.open(request(request_id, priority=int(other)), None, None)

    def remove(self, kind: Kind, made: Any) -> None:
        if kind is Kind.CREATION:
            assert self.gateway.release(made)
        elif kind is Kind.FORK:
            assert all(self.gateway.release(each) for each in made)
        else:
            made.cancel()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_repetition_is_answered_with_what_was_made(kind: Kind) -> None:
    server = Server()
    made = server.make(kind, "a")
    assert server.make(kind, "a") == made != server.make(kind, "b")
    assert server.make(kind, "") != server.make(kind, ""), "without an id nothing is a repetition"


@pytest.mark.parametrize(("first", "second"), list(itertools.product(KINDS, KINDS)))
async def test_an_id_belongs_to_one_request(first: Kind, second: Kind) -> None:
    server = Server()
    made = server.make(first, "a")
    before = len(server.gateway.machine)
    with pytest.raises((QuireError, AssertionError)) as caught:
        server.make(second, "a", other=True)
    refusal = caught.value
    if not isinstance(refusal, QuireError):
        (refusal,) = refusal.args
    assert isinstance(refusal, InvalidArgument)
    assert (refusal.reason, refusal.field) == ("REQUEST_ID_REUSED", "request_id")
    assert server.make(first, "a") == made and len(server.gateway.machine) == before, "nothing was made"
    server.remove(first, made)
    assert server.make(second, "a", other=True), "it is free again when nothing is left of it"


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_left_of_what_is_gone(kind: Kind) -> None:
    server = Server()
    for number in range(3):
        server.remove(kind, server.make(kind, f"a{number}"))
    await asyncio.sleep(0)
    assert not len(server.idempotency)


def test_a_tenant_sees_only_its_own() -> None:
    idempotency = IdempotencyTable()
    idempotency.add("a", None, Kind.EXECUTION, "made")
    assert idempotency.find("a", idempotency.anonymous, Kind.EXECUTION) and not idempotency.find(
        "a", ALICE, Kind.EXECUTION
    )
    idempotency.begin("a", ALICE, Kind.FORK)
    idempotency.end("a", ALICE, Kind.FORK)
    assert len(idempotency) == 1


def test_of_two_kinds_in_an_earlier_journal_the_first_is_found() -> None:
    """Before, a creation and a fork could have one id."""
    idempotency = IdempotencyTable()
    idempotency.add("a", None, Kind.CREATION, "cache")
    idempotency.add("a", None, Kind.FORK, "child", index=1)
    assert idempotency.find("a", None, Kind.FORK) is None
    idempotency.remove("a", None, Kind.FORK, "child", index=1)
    idempotency.remove("a", None, Kind.CREATION, "another cache")
    assert len(idempotency) == 1
    idempotency.remove("a", None, Kind.CREATION, "cache")
    assert not len(idempotency)
