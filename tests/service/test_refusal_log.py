"""Refused and cancelled calls are logged with a rate limit, and all refusals are counted."""

from __future__ import annotations

from typing import Any

import pytest

from service.api import refusal_log
from service.api.refusal_log import RefusalLog
from service.errors import Draining, QueueFull


def test_a_flood_is_logged_in_part_and_counted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, dict[str, Any]]] = []

    class Log:
        def info(self, event: str, **values: object) -> None:
            lines.append((event, values))

    monkeypatch.setattr(refusal_log, "_log", Log())
    now_s = 100.0
    log = RefusalLog(lambda: now_s)
    for _ in range(1000):
        log.refused("Decode", QueueFull(9, 1.0), 0.1)
        log.cancelled("Decode", 0.1)
    assert len(lines) == 50 and all("untold_before" not in values for _, values in lines)
    now_s += 1
    log.refused("Prefill", Draining(), 0.1)
    log.cancelled("Prefill", 0.1)
    assert [event for event, _ in lines[50:]] == ["call refused", "call cancelled"]
    assert lines[50][1]["untold_before"] == 1950 and "untold_before" not in lines[51][1]
    assert log.by_reason == {"QUEUE_FULL": 1000, "DRAINING": 1}
