"""The process that starts the gateways of a host."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.extensions.gateways import parent


async def test_a_gateway_that_cannot_be_started_for_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the others ended, too: with a traceback."""
    monkeypatch.setattr(parent, "_MIN_BACKOFF_S", 0.0)
    tries = 0

    async def wait() -> int:
        return 7

    async def start(_: object, _index: int) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(parent._Parent, "_start", start)
    with capture_logs() as logs:
        assert await parent._Parent([b""])._keep(0) == 7
    assert [entry["error"] for entry in logs] == [os.strerror(errno.EAGAIN)] * 2
