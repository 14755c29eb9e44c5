"""How many connections there are descriptors for."""

from __future__ import annotations

import resource

import pytest
import structlog

from service.config import Config
from service.doors.descriptors import with_descriptors

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "soft", "allowed"),
    [
        ((20_000, 20_000), 4096, 20_000, 4096),
        ((UNLIMITED, UNLIMITED), 4096, UNLIMITED, 4096),
        # A soft limit for the sake of old programs: there is room for twice as many, and for workers.
        ((1024, 524_288), 4096, 2 * 4096 + 128 + 2 * 16, 4096),
        ((1024, UNLIMITED), 4096, 2 * 4096 + 128 + 2 * 16, 4096),
        ((1024, 5000), 4096, 5000, 4096),
        ((1024, 1024), 4096, 1024, 1024 - 128 - 2 * 16),
        ((1024, 1024), 100, 1024, 100),
        ((100, 100), 4096, 100, 1),
    ],
)
def test_there_are_no_more_connections_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, soft: int, allowed: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: now.append(new))
    with structlog.testing.capture_logs() as logs:
        config = with_descriptors(Config(max_connections=wanted, workers=2))
    assert now[-1] == (soft, limits[1])
    assert config.max_connections == allowed
    assert len(logs) == (allowed < wanted), "it is said once"
