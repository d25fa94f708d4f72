from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from tests.http.fakes import FakeRuntime


@pytest.fixture
async def runtime(nursery: trio.Nursery) -> AsyncIterator[FakeRuntime]:
    """A running fake runtime with the default settings."""
    fake = FakeRuntime()
    nursery.start_soon(fake.run)
    yield fake
    nursery.cancel_scope.cancel()
