"""What tests of the server share. `serving` imports MLX, whose BLAS is chosen after this file."""

import pytest


@pytest.fixture(scope="session")
def target():
    """A target without tools or thoughts."""
    from serving import make_target

    return make_target()


@pytest.fixture
def engine(target):
    """An engine that says hello, and keeps what it is asked."""
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
    """What runs tests that are coroutines."""
    return "asyncio"
