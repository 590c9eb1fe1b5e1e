"""The documentation says what the program does: pages, defaults, links and the length of --help."""

import re
from pathlib import Path

import make_docs
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dflash_mlx.cli.app import app

ROOT = Path(__file__).parents[2]
COMMANDS = get_command(app).commands
SCREEN, COLUMNS = 70, 100  # lines and columns of a terminal that is not small
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + [ROOT / "dflash_mlx" / "tiny" / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def help_of(*arguments: str, columns: int = COLUMNS) -> str:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    done = runner.invoke(app, [*arguments, "--help"], prog_name="dflash-mlx")
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name):
    lines = help_of(name).splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= COLUMNS
    assert max(map(len, help_of(name, columns=40).splitlines())) <= 40


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_its_default_and_two_examples(name):
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", help_of(name)).split())
    assert shown.partition("Examples:")[2].count(f"dflash-mlx {name}") == 2
    for param in COMMANDS[name].params:
        if param.param_type_name == "option":
            assert all(option in shown for option in param.opts), param.opts
        default = make_docs.default_of(param).strip("`").removeprefix("--")
        assert param.help and f"[default: {default}]" in shown or not default, param.opts


def test_every_command_has_its_page():
    assert {path.stem for path in make_docs.FOLDER.glob("*.md")} == {*COMMANDS, "README"}
    for path, text in make_docs.pages().items():
        assert path.read_text() == text, f"{path}: run python scripts/make_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [(page.parent / target).resolve() for target in LINK.findall(page.read_text())]
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_docs_exist(page):
    """Every option that a line of code gives to a command is one of the command's."""
    for name, rest in re.findall(r"dflash-mlx (\w+)([^\n`#]*)", page.read_text()):
        if name not in COMMANDS:
            continue
        known = {option for p in COMMANDS[name].params for option in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) <= known | {"--help"}, (name, rest)
