"""How many connections there are descriptors for."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import structlog

from service.config import Config
from service.doors.descriptors import TooFewDescriptors, with_descriptors

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


@pytest.mark.parametrize("limit", [20, 12])
def test_with_hardly_any_the_server_ends_with_a_line(limit: int) -> None:
    """Whatever would have failed first."""
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "serve", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    said = f"quire: {limit} descriptors are too few to serve (ulimit -n); for all connections it takes 8336\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_too_few_are_too_few_whatever_the_soft_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(TooFewDescriptors, match="32 descriptors are too few"):
        with_descriptors(Config())
