"""Attacks that need no gateway of their own, once or twice: nobody is harmed, and nothing grows.

How long bystanders wait is measured by `python -m tests.attacks`; here it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks import fairness, memory, messages
from tests.attacks.bystanders import Bystanders
from tests.attacks.frame import SHORT_HELD_S, SHORT_PAUSE_S, SHORT_SHARE, Attack, Scene, measure
from tests.gateway_process import GatewayProcess

UNREAD_MIB, JOURNAL_MIB, MESSAGE_MIB = 64, 16, 16
# The allocator's, the interpreter's, and of what is received before anybody can look at it.
SLACK_MIB = 128
LIMITS = {
    "--max-unread-bytes": UNREAD_MIB << 20,
    "--max-journal-bytes": JOURNAL_MIB << 20,
    "--max-caches": 4096,
    "--kv-pages": 4096,
    "--message-timeout-s": 2,
    "--max-connections": 200,
}
BY_NAME = {
    attack.name: attack
    for attack in (*messages.ATTACKS, *memory.ATTACKS, *fairness.ATTACKS)
    if attack.gateway is None
}
FULL = "RESOURCE_EXHAUSTED ANSWERS_FULL"
# Name, tries, and what it must have been answered, if one answer is right.
SHORT = (
    ("empty calls", 2, "INVALID_ARGUMENT TOO_MANY_CALLS"),
    ("forks", 2, ""),
    ("forks that part", 2, ""),
    ("unread answers", 1, ""),
    ("half-sent", 1, ""),
)
# What stands against these is also tested by itself: in test_parsing.py, test_masks.py, test_logging.py and
# test_handshakes.py of tests/service and, over a socket, in tests/e2e/test_bounds.py.
THOROUGH = (
    ("empty items", 2, "INVALID_ARGUMENT TOO_MANY_ITEMS"),
    ("large mask", 1, "INVALID_ARGUMENT BAD_MASK"),
    ("full mask", 2, "OK"),
    ("long prompts", 1, "OUT_OF_RANGE SEQUENCE_TOO_LONG"),
    ("control characters", 2, ""),
    ("connections", 1, ""),
)


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Scene, Bystanders]]:
    flags = [word for name, value in LIMITS.items() for word in (name, str(value))]
    with GatewayProcess(model="paged-attention", workers=2, flags=flags) as gateway:
        first = gateway.status().workers[0].worker_id
        with Bystanders(gateway.address, first, gateway.log_path.parent, SHORT_PAUSE_S) as bystanders:
            yield Scene(gateway, SHORT_HELD_S, SHORT_SHARE), bystanders


@pytest.mark.parametrize(
    ("name", "tries", "answer"),
    [
        *(pytest.param(*each, id=each[0]) for each in SHORT),
        *(pytest.param(*each, id=each[0], marks=pytest.mark.thorough) for each in THOROUGH),
    ],
)
def test_attack(scene: tuple[Scene, Bystanders], name: str, tries: int, answer: str) -> None:
    target, bystanders = scene
    target.answers.clear()
    target.notes.clear()
    attack: Attack = BY_NAME[name]
    outcome = measure(attack, target, bystanders, tries, JOURNAL_MIB + SLACK_MIB)
    assert outcome.replaced == 0, "a healthy worker was killed"
    assert outcome.steps > 0 and not outcome.failed, "bystanders were answered"
    assert not answer or set(outcome.answers) == {answer}
    # What there is room for is computed, and the rest is refused.
    assert name != "unread answers" or set(outcome.answers) == {"not read", FULL}
    budget_mib = UNREAD_MIB + JOURNAL_MIB + 14 * MESSAGE_MIB + SLACK_MIB
    # What arrives within a second is not counted, and how much that is depends on the machine.
    assert name == "half-sent" or outcome.gateway_mib < budget_mib, outcome
    assert outcome.kept_mib < JOURNAL_MIB + SLACK_MIB, outcome
    assert "connection stands, message held" not in outcome.answers
    assert target.notes.get("connections", 0) <= 200
    assert target.notes.get("control bytes in the log", 0) == 0
