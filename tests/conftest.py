"""What every test shares: the helpers beside this file, and hypothesis without a clock."""

import sys
from pathlib import Path

import hypothesis
import pytest

# pytest's importlib mode leaves the tests' folder out, and the helpers live in it.
sys.path.insert(0, str(Path(__file__).parent))

# The same examples everywhere, every time: a red build is a bug, never bad luck.
hypothesis.settings.register_profile("dflash", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("dflash")


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """The command line's options that choose a random pair, in folders as the hub has them."""
    import tinymodels

    folder = tmp_path_factory.mktemp("pair")
    target = tinymodels.save_target(folder / "target")
    drafter = tinymodels.save_drafter(folder / "drafter")
    return ["--model", str(target), "--draft", str(drafter)]
