"""`generate`: where its prompt comes from, where its answer goes, and what it reports."""

import pytest
import tinymodels
from typer.testing import CliRunner

from dflash_mlx.cli import generate as command
from dflash_mlx.cli.app import app
from dflash_mlx.cli.pair import Pair
from dflash_mlx.machine.blas import BlasInfo

QUESTION = "what is 1 + 2?"
ASKED = (QUESTION, "-n", "12")
BLAS = BlasInfo("stock", None, "made up")


def invoke(*arguments, stdin: str | bytes = ""):
    """`generate` in this process."""
    given = ["generate", *map(str, arguments)]
    return CliRunner().invoke(app, given, input=stdin, prog_name="dflash-mlx")


def refused(*arguments, stdin: str | bytes = "", code: int = 2) -> str:
    """The one-line error of a run that ends before any model is loaded."""
    done = invoke(*arguments, "--model", "no/such-model", "--offline", stdin=stdin)
    assert done.exit_code == code and not done.stdout and done.stderr.count("\n") == 1
    assert "no/such-model" not in done.stderr
    return done.stderr


@pytest.fixture
def loaded(monkeypatch) -> Pair:
    """A pair that `generate` finds loaded."""
    pair = Pair(tinymodels.target(), drafter=tinymodels.random_drafter(), block_size=4, blas=BLAS)
    monkeypatch.setattr(command, "open_pair", lambda *_: pair)
    monkeypatch.setattr(command, "open_pair", lambda *_, **__: pair)
