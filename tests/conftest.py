"""Setup of every test run: hypothesis, the BLAS, the order of the tests, and shared fixtures."""

import gc
import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

from dflash_mlx.machine.blas import use_fast_blas

# MLX computes in a second thread, which the main thread wakes for every small operation. Under the
# batch scheduling policy a woken thread does not preempt the running one at once. This saves a
# sixth of the tests' time.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Hypothesis tries the same examples on every machine: a test that fails once fails always.
hypothesis.settings.register_profile("dflash", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("dflash")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this test suite.

    With `--ranks 2`, test_serve_process.py starts its server as a cluster of two ranks on this
    machine. With `--stock-blas`, the tests run on the BLAS that MLX's wheel links to, which is what
    users have on Linux, instead of the faster one that the tests use.
    """
    parser.addoption(
        "--ranks", type=int, default=1, help="ranks of the server in test_serve_process.py"
    )
    parser.addoption("--stock-blas", action="store_true", help="use MLX's own BLAS, which is slow")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tests' BLAS. This must happen before anything imports MLX."""
    if not config.getoption("--stock-blas"):
        use_fast_blas()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put each test in an xdist group; the tests of one group run in the same process.

    The default group is the file, so that its module fixtures are built once. A file marked
    `by_family` is split into one group per family, because only tests of one family share models
    and texts there. A test that is marked with a group keeps it.

    This is not done in `pytest_collection_modifyitems`, because xdist has read the groups by then.
    """
    if item.get_closest_marker("xdist_group"):
        return
    group = item.path.stem
    if item.get_closest_marker("by_family") and hasattr(item, "callspec"):
        group = item.callspec.params.get("family", group)
    item.add_marker(pytest.mark.xdist_group(group))


def group_of(item: pytest.Item) -> str:
    """The name of the test's xdist group."""
    return item.get_closest_marker("xdist_group").args[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `matrix` unless `-m matrix` selects them; start slow groups first.

    A group with a slow test that started last would run long after all other processes are done.
    """
    if "matrix" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)
    slow = {group_of(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group_of(item) not in slow)


def pytest_collection_finish() -> None:
    """Make garbage collection cheaper: skip the imported modules, and collect less often."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """Command-line options that select a random target and drafter, saved in the hub's layout."""
    import tinymodels

    folder = tmp_path_factory.mktemp("pair")
    target = tinymodels.save_target(folder / "target")
    drafter = tinymodels.save_drafter(folder / "drafter")
    return ["--model", str(target), "--draft", str(drafter)]


@pytest.fixture(scope="session")
def make_docs():
    """scripts/make_docs.py as a module."""
    path = Path(__file__).parents[1] / "scripts" / "make_docs.py"
    spec = importlib.util.spec_from_file_location("make_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
