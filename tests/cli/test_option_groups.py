"""Groups of options in a command's signature: what Typer sees, and what the command gets."""

from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dflash_mlx.cli.options import argument, expand_groups, option


@dataclass(frozen=True)
class Names:
    model: str = argument(..., "The model.")
    draft: str = option("none", "Model", "NAME", "What drafts.", "--draft", "-d")


@dataclass(frozen=True)
class Sampling:
    seed: int = option(7, "Model", "N", "", min=0)


@pytest.fixture
def program():
    """A command that keeps what it got, beside its Typer application."""
    got = []
    times: Any = option(1, "Model", "N", "")

    def command(*, loud: bool = False, names: Names, times: int = times, more: Sampling) -> None:
        """Says what it got."""
        got.append((loud, names, times, more))

    app = typer.Typer(add_completion=False)
    app.command()(expand_groups(command))
    return app, got


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a"], (False, Names("a"), 1, Sampling())),
        (["a", "-d", "b", "--seed", "3"], (False, Names("a", "b"), 1, Sampling(3))),
        (["--loud", "--times", "2", "a"], (True, Names("a"), 2, Sampling())),
        (["a", "--seed", "-1"], None),
        ([], None),
    ],
)
def test_fields_are_options(program, arguments, expected):
    app, got = program
    assert CliRunner().invoke(app, arguments).exit_code == (0 if expected else 2)
    assert got == ([expected] if expected else [])


def test_help_has_the_fields_in_the_place_of_their_group(program):
    shown = CliRunner().invoke(program[0], ["--help"]).output
    places = [shown.index(name) for name in ("--loud", "--draft", "--times", "--seed")]
    assert places == sorted(places) and "Says what it got." in shown and "What drafts." in shown
    assert "--names" not in shown and "--more" not in shown
