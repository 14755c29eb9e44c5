"""A fake provider for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.service.extensions.providers.fake_provider import FakeProvider, fake_provider


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with fake_provider() as made:
        yield made
