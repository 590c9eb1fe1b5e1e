"""What every test shares: hypothesis without a clock, a BLAS, an order, and a pair on disk."""

import gc
import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

from dflash_mlx.machine.blas import use_fast_blas

# MLX computes in a thread of its own, which the main one wakes for every small operation. As a
# batch job a woken thread lets the other go on for a while: a sixth of the time less.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The same examples everywhere, every time: a red build is a bug, never bad luck.
hypothesis.settings.register_profile("dflash", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("dflash")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--ranks 2` has the tests of the real server ask one of so many ranks on this machine.

    `--stock-blas` shows on the BLAS that people may have what else holds on the tests' own.
    """
    parser.addoption("--ranks", type=int, default=1, help="of the server in test_serve_process")
    parser.addoption("--stock-blas", action="store_true", help="MLX's own BLAS, which is slow")


def pytest_configure(config: pytest.Config) -> None:
    """The tests' BLAS, before anything imports MLX."""
    if not config.getoption("--stock-blas"):
        use_fast_blas()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say what xdist keeps in one process: a file's tests, whose fixtures are then made once.

    Files marked `by_family` share models and texts between tests of one family only, and a test
    may name a group of its own. (Later, when all items are collected, xdist has read the groups
    already.)
    """
    if item.get_closest_marker("xdist_group"):
        return
    group = item.path.stem
    if item.get_closest_marker("by_family") and hasattr(item, "callspec"):
        group = item.callspec.params.get("family", group)
    item.add_marker(pytest.mark.xdist_group(group))


def group_of(item: pytest.Item) -> str:
    """The name of what one process runs together."""
    return item.get_closest_marker("xdist_group").args[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups with a slow test begin first, so that no process ends long after the others.

    What is marked `matrix` runs where it is asked for.
    """
    if "matrix" not in config.getoption("markexpr"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)
    slow = {group_of(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group_of(item) not in slow)


def pytest_collection_finish() -> None:
    """What was imported stays, so no collection of garbage need look at it; nor so often."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """The command line's options that choose a random pair, in folders as the hub has them."""
    import tinymodels

    folder = tmp_path_factory.mktemp("pair")
    target = tinymodels.save_target(folder / "target")
    drafter = tinymodels.save_drafter(folder / "drafter")
    return ["--model", str(target), "--draft", str(drafter)]


@pytest.fixture(scope="session")
def make_docs():
    """The script that writes the pages."""
    path = Path(__file__).parents[1] / "scripts" / "make_docs.py"
    spec = importlib.util.spec_from_file_location("make_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
