"""What is not durable has not happened: records that fail, or take their time."""

from __future__ import annotations

import pytest

from service.caches.requests import Append, Appended, AppendKind, Renew
from service.errors import QuireError
from tests.sim.harness import Gateway, decode, prefill


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def is_unavailable(outcome: object) -> bool:
    return isinstance(outcome, QuireError) and (outcome.code, outcome.reason, outcome.retry_after_s) == (
        "UNAVAILABLE",
        "JOURNAL_UNAVAILABLE",
        1.0,
    )


def test_nothing_is_computed_that_could_not_be_kept(gateway: Gateway) -> None:
    """Until the journal works again; what keeps nothing goes on."""
    cache = gateway.create(1)
    gateway.disk.fails = True
    gateway.run(Renew(cache))
    sent = len(gateway.sent)
    assert is_unavailable(gateway.run(decode(cache, 2))) and is_unavailable(gateway.run(prefill(3)))
    assert len(gateway.sent) == sent
    assert isinstance(gateway.run(Append(AppendKind.SCORE, "", [1, 2], rows=2)), Appended)
