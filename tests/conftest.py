"""What every test shares: hypothesis without a clock, and a pair on disk."""

import hypothesis
import pytest

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
