"""A fake server for the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_executor import FakeExecutor, serving


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def target(executor: FakeExecutor) -> Iterator[str]:
    with serving(executor) as address:
        yield address
