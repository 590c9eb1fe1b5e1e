"""Fixtures of the server's tests.

They import `serving` late, because it imports MLX, and the BLAS is chosen after this file is read.
"""

import pytest


@pytest.fixture(scope="session")
def target():
    """A target without tools or thoughts."""
    from serving import make_target

    return make_target()


@pytest.fixture
def engine(target):
    """A fake engine that answers "Hello world" and records its requests."""
    from serving import FakeEngine

    return FakeEngine(target)


@pytest.fixture(scope="module")
def server(target):
    """A client of a server with a fake engine, for tests that do not inspect the engine."""
    from serving import FakeEngine, client

    with client(FakeEngine(target)) as test_client:
        yield test_client


@pytest.fixture(scope="session")
def anyio_backend():
    """The event loop that runs coroutine tests."""
    return "asyncio"
