"""The script that types README's commands finds them, and fails where one of them does."""

import re
import shutil
from pathlib import Path

import check_readme
import pytest
from check_readme import Command, commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PAGE = """# A page

Text with `make inline`, and a block:

    make demo
    $ make demo
    output of it

```bash
dflash-mlx doctor
```

```python
import sys
make = 1
```

    dflash-mlx generate "hi" --model Qwen/Qwen3-8B
"""


def test_what_is_a_command():
    assert commands(PAGE) == [
        Command("make demo"),
        Command("make demo"),
        Command("dflash-mlx doctor"),
        Command("import sys\nmake = 1\n", python=True),
        Command('dflash-mlx generate "hi" --model Qwen/Qwen3-8B'),
    ]
    assert [bool(command.left_out) for command in commands(PAGE)] == [False] * 4 + [True]


def test_no_command_of_the_readme_is_missed():
    found = "\n".join(command.text for command in commands(README))
    typed = re.findall(r"^    (?:\$ )?((?:make|pip|uv|\.|.*dflash-mlx) .*)$", README, re.MULTILINE)
    assert len(typed) > 5 and all(line in found for line in typed)
    assert README.count("```python") == sum(command.python for command in commands(README)) > 0


def test_little_is_left_out():
    run = [command.text for command in commands(README) if not command.left_out]
    for start in ("make demo", ".", "dflash-mlx generate", "dflash-mlx bench", "import dflash_mlx"):
        assert any(text.startswith(start) for text in run), start
    assert len(run) > len(commands(README)) / 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_that_is_pasted_has_a_comment(page):
    """In zsh, every Mac's shell, a trailing comment is arguments of the command."""
    shell = [command.text for command in commands(page.read_text()) if not command.python]
    assert not [text for text in shell if re.search(r"(^|\s)#", text)]


def test_a_block_of_readme_is_one_command():
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", README, re.MULTILINE)
    assert max(len(commands(block)) for block in blocks) == 1 and len(blocks) > 6


@pytest.mark.parametrize("shell", check_readme.SHELLS)
@pytest.mark.parametrize(
    "texts, status",
    [
        (["cat", "echo fine > made", "cat made"], 0),  # cat must not read the paste
        (["echo 'it''s'", "cat nowhere", "echo never > made"], 1),
        (["dflash-mlx --version"], 127),  # the environment that runs the tests is not seen
        (["python3 - > made <<'PROGRAM'\nprint(1)\nPROGRAM"], 0),
    ],
)
def test_the_first_failure_ends_it(texts, status, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    assert check_readme.type_in([Command(text) for text in texts], tmp_path, shell) == status
    assert (tmp_path / "made").exists() == (status == 0)


def test_zsh_takes_a_comment_for_arguments(tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed: apt-get install zsh")
    typed = [Command("test -z ''   # nothing")]
    assert check_readme.type_in(typed, tmp_path, "zsh") != 0
    assert check_readme.type_in(typed, tmp_path, "bash") == 0


def test_a_clone_has_what_git_has(tmp_path):
    check_readme.clone(tmp_path)
    assert (tmp_path / "dflash_mlx" / "cli").is_symlink() and (tmp_path / "cli/main.py").exists()
    assert not (tmp_path / ".venv").exists()
