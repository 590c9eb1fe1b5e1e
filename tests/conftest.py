"""What every test shares: hypothesis without a clock, and a pair on disk."""

import hypothesis
import pytest

# The same examples everywhere, every time: a red build is a bug, never bad luck.
hypothesis.settings.register_profile("dflash", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("dflash")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say what xdist keeps in one process: a file's tests, whose fixtures are then made once.

    Files marked `by_family` share models and texts between tests of one family only. (Later, when
    all items are collected, xdist has read the groups already.)
    """
    group = item.path.stem
    if item.get_closest_marker("by_family") and hasattr(item, "callspec"):
        group = item.callspec.params.get("family", group)
    item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """The command line's options that choose a random pair, in folders as the hub has them."""
    import tinymodels

    folder = tmp_path_factory.mktemp("pair")
    target = tinymodels.save_target(folder / "target")
    drafter = tinymodels.save_drafter(folder / "drafter")
    return ["--model", str(target), "--draft", str(drafter)]
