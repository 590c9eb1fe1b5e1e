"""Dataclasses of options in a command's signature: what Typer sees, and what the command gets."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dflash_mlx.cli.options import expand_groups


@dataclass(frozen=True)
class Names:
    model: Annotated[str, typer.Argument()]
    draft: Annotated[str, typer.Option("--draft", "-d", help="What drafts.")] = "none"


@dataclass(frozen=True)
class Sampling:
    seed: Annotated[int, typer.Option(min=0)] = 7


@pytest.fixture
def program():
    """A command that keeps what it got, beside its Typer application."""
    got = []

    def command(*, loud: bool = False, names: Names, times: int = 1, sampling: Sampling) -> None:
        """Says what it got."""
        got.append((loud, names, times, sampling))

    app = typer.Typer(add_completion=False)
    app.command()(expand_groups(command))
    return app, got


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a"], (False, Names("a"), 1, Sampling())),
        (["a", "-d", "b", "--seed", "3"], (False, Names("a", "b"), 1, Sampling(3))),
        (["--loud", "--times", "2", "a"], (True, Names("a"), 2, Sampling())),
    ],
)
def test_fields_are_options(program, arguments, expected):
    app, got = program
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert got == [expected]


def test_limits_and_missing_values_are_typers_own(program):
    app, got = program
    assert CliRunner().invoke(app, ["a", "--seed", "-1"]).exit_code == 2
    assert CliRunner().invoke(app, []).exit_code == 2
    assert not got


def test_help_has_the_fields_in_the_place_of_their_dataclass(program):
    shown = CliRunner().invoke(program[0], ["--help"]).output
    places = [shown.index(name) for name in ("--loud", "--draft", "--times", "--seed")]
    assert places == sorted(places) and "Says what it got." in shown and "What drafts." in shown
    assert "--names" not in shown and "--sampling" not in shown
