"""Logging is the process's: tests of what configures it leave it as it was. A database, for a session."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from tests.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> PostgresServer:
    """Without tables."""
    postgres_server.reset()
    return postgres_server


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands that run in this process set it for good."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    # Not as an attribute: loggers remember what they are to log.
    root.setLevel(level)
