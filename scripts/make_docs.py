"""Write docs/commands/: a page for each command, from the declarations that --help prints.

    python scripts/make_docs.py

What stands below the mark in a page is written by people and stays. tests/test_docs.py fails when
a page is not what this would write.
"""

from enum import Enum
from pathlib import Path
from typing import Any

from typer.main import get_command

from dflash_mlx.cli.app import app

FOLDER = Path(__file__).parents[1] / "docs" / "commands"
MARK = "<!-- Above this line scripts/make_docs.py writes; below it people do. -->\n"
PROGRAM = "dflash-mlx"


def generated(name: str, command: Any) -> str:
    """The part of a command's page that is made from its declaration, the mark at its end."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([PROGRAM, name, *map(_argument, arguments), "[OPTIONS]"])
    lines = [f"# {PROGRAM} {name}", "", command.help.strip(), "", f"    {usage}", ""]
    groups: dict[str, list[Any]] = {}
    for one in command.params:
        title = "Arguments" if one in arguments else one.rich_help_panel or "Options"
        groups.setdefault(title, []).append(one)
    for title, params in groups.items():
        lines += [f"## {title}", "", "| | | default |", "|---|---|---|"]
        lines += [_row(one) for one in params]
        lines.append("")
    return "\n".join([*lines, MARK])


def _argument(param: Any) -> str:
    name = (param.metavar or param.name).upper() + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        names = f"`{_argument(param).strip('[]')}`"
    else:
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        if not param.is_flag and param.metavar:
            names += f" {param.metavar.replace('|', ' or ')}"
    return f"| {names} | {param.help} | {default_of(param)} |"


def default_of(param: Any) -> str:
    """A default as a person would type it; empty where leaving the option out says it all."""
    default = param.default
    if default is None or callable(default):
        return ""
    if isinstance(default, bool):
        return f"`{param.opts[0]}`" if default else ""
    return f"`{default.value if isinstance(default, Enum) else default}`"


def pages() -> dict[Path, str]:
    """Every page by its path, what people wrote included."""
    found = {}
    lines = ["# Commands", ""]
    for name, command in get_command(app).commands.items():
        path = FOLDER / f"{name}.md"
        below = path.read_text().partition(MARK)[2] if path.exists() else ""
        found[path] = generated(name, command) + below
        lines.append(f"- [{PROGRAM} {name}]({path.name}): {command.help.strip().splitlines()[0]}")
    found[FOLDER / "README.md"] = "\n".join(lines) + "\n"
    return found


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
