"""Write the generated parts of docs/.

    python scripts/make_docs.py

- docs/commands/: a page for each command, from what --help prints; text below its mark is kept.
- docs/fields.md: what requests to the server may say, from the models that read them.
- docs/targets.md: its table, from a tiny model of every kind.

tests/project/test_docs.py and tests/targets/test_every_model.py fail if a page is out of date.
"""

import json
import tomllib
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import AliasChoices
from typer.main import get_command

from dflash_mlx.cli.app import app
from dflash_mlx.cli.chat_commands import COMMANDS
from dflash_mlx.errors import ConfigError
from dflash_mlx.serve.body import Body
from dflash_mlx.serve.completions import CompletionsBody
from dflash_mlx.serve.messages import CountBody, MessagesBody
from dflash_mlx.serve.ollama import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from dflash_mlx.serve.openai_chat import ChatBody
from dflash_mlx.serve.responses import ResponsesBody
from dflash_mlx.targets import Target
from dflash_mlx.targets.internals import classes_of

FIELDS = Path(__file__).parents[1] / "docs" / "fields.md"
IGNORED = Path(__file__).parent / "ignored_fields.toml"
BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionsBody,
    ResponsesBody,
    MessagesBody,
    CountBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
FOLDER = Path(__file__).parents[1] / "docs" / "commands"
TARGETS = Path(__file__).parents[1] / "docs" / "targets.md"
MODELS = Path(__file__).parents[1] / "tests" / "data" / "mlx_lm_models.json"
TABLE_BEGIN = "<!-- scripts/make_docs.py writes this table -->"
TABLE_END = "<!-- end of the table -->"
MARK = "<!-- Above this line scripts/make_docs.py writes; below it people do. -->\n"
PROGRAM = "dflash-mlx"


def generated(name: str, command: Any) -> str:
    """The part of a command's page that is made from its declaration, the mark at its end."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([PROGRAM, name, *map(_argument, arguments), "[OPTIONS]"])
    lines = [
        f"# {PROGRAM} {name}",
        "",
        command.help.strip(),
        "",
        f"    {usage}",
        "",
        "For example:",
    ]
    lines += ["", *(f"    {example}" for example in command.epilog.split("\n")[1:]), ""]
    lines += ["| | | default |", "|---|---|---|", *map(_row, command.params), ""]
    if name == "chat":
        lines += ["| in a chat | |", "|---|---|"]
        for typed, entry in COMMANDS.items():
            line = f"{typed} {entry.argument}".strip().replace("|", r"\|")
            lines.append(f"| `{line}` | {entry.help} |")
        lines.append("")
    return "\n".join([*lines, MARK])


def _argument(param: Any) -> str:
    """An argument as the usage line shows it: "[PROMPT...]" if it may be left out or repeated."""
    name = (param.metavar or param.name).upper() + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _row(param: Any) -> str:
    """A row of a command's table: an argument's or option's names, help and default."""
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
    if default in (None, "") or callable(default):
        return ""
    if isinstance(default, bool):
        return f"`{param.opts[0]}`" if default else ""
    return f"`{default.value if isinstance(default, Enum) else default}`"


def pages() -> dict[Path, str]:
    """Every page by its path, what people wrote included."""
    texts = {}
    lines = ["# Commands", ""]
    for name, command in get_command(app).commands.items():
        path = FOLDER / f"{name}.md"
        below = path.read_text().partition(MARK)[2] if path.exists() else ""
        texts[path] = generated(name, command) + below
        lines.append(f"- [{PROGRAM} {name}]({path.name}): {command.help.strip().splitlines()[0]}")
    texts[FOLDER / "README.md"] = "\n".join(lines) + "\n"
    texts[FIELDS] = fields()
    return texts


def fields() -> str:
    """docs/fields.md with its tables written anew."""
    lines = []
    for body in BODIES:
        table = sorted(support(body, depth=2).items())
        lines += [f"## {body.__doc__}", "", "| | fields |", "|---|---|"]
        for kind in ("yes", "only", "refused"):
            named = [_field(name, text, kind) for name, text in table if text.startswith(kind)]
            lines += [f"| {kind} | {', '.join(named)} |"] if named else []
        lines.append("")
    lines += ["## Ignored fields", "", "| fields | why |", "|---|---|"]
    for reason, names in tomllib.loads(IGNORED.read_text()).items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {reason} |")
    introduction = FIELDS.read_text().partition("## ")[0]
    return introduction + "\n".join([*lines, ""])


def _field(name: str, text: str, kind: str) -> str:
    """A field as a cell lists it, with its values in brackets: what `text` says after `kind`."""
    values = text.removeprefix(kind).lstrip(", ")
    return f"`{name}` ({values})" if values else f"`{name}`"


@cache
def support(body: type[Body], depth: int) -> dict[str, str]:
    """What a request may say in each declared field: "yes" and a range, "refused", or "only ...".

    With a `depth` of 2, the fields of objects inside are listed too, as "outer.inner".
    """
    schema = body.model_json_schema()
    fields = dict[str, str]()
    properties = schema.get("$defs", {}).get(body.__name__, schema)["properties"]
    for name, field in body.model_fields.items():
        alias = field.validation_alias or field.alias or name
        spellings = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names = [str(spelling) for spelling in spellings]
        nested_bodies = _bodies(field.annotation) if depth > 1 else []
        for spelling in names:
            fields[spelling] = _support(properties[names[0]])
            for nested in nested_bodies:
                for inner, text in support(nested, depth - 1).items():
                    place = f"{spelling}.{inner}"
                    # If the models of a union differ in a field, some value of it is read.
                    fields[place] = text if fields.get(place, text) == text else "yes"
    for name, only in body.unsupported.items():
        fields[name] = "refused" if only is None else f"only `{only!r}`"
    return fields


def _bodies(annotation: Any) -> list[type[Body]]:
    """The request models that a type annotation names, alone or in a union or list."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [body for arg in get_args(annotation) for body in _bodies(arg)]


def _support(schema: dict[str, Any]) -> str:
    """What a field's JSON schema allows: "only ..." for one value, otherwise "yes" and a range."""
    merged: dict[str, Any] = {}
    for variant in [*schema.get("anyOf", ()), schema]:
        merged |= variant
    return f"only `{merged['const']!r}`" if "const" in merged else "yes" + _range(merged)


def _range(schema: dict[str, Any]) -> str:
    """The bounds of a field's values, as ", 0 to 2"."""
    low = schema.get("minimum")
    high = schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        return f", above {above}" + (f", {high} at most" if high is not None else "")
    if "maxItems" in schema:
        return f", {schema['maxItems']} at most in a list"
    if low is None and high is None:
        return ""
    return f", {low} to {high}" if high is not None else f", {low} or more"


def drafting(target: Target) -> str:
    """Two cells of a target's row: what a rejected row costs, and whether trees are verified."""
    cost = "nothing, or a replayed state" if target.has_rollback else "kept rows run again"
    return f"{cost} | {target.why_no_trees or 'yes'}"


def targets() -> str:
    """docs/targets.md with its table written anew."""
    modules: dict[str, list[str]] = {}  # by the other cells of their row
    for name, config in json.loads(MODELS.read_text()).items():
        model_class, arguments = classes_of(config)
        cells = "not run: its layers need Metal | "
        with suppress(ConfigError, RuntimeError):
            model = model_class(arguments.from_dict(config))
            cells = drafting(Target(model, tokenizer=None, config=config, name=name))
        modules.setdefault(cells, []).append(f"`{name}`")
    lines = ["| rejected rows cost | trees | mlx-lm modules |", "|---|---|---|"]
    lines += [f"| {cells} | {', '.join(names)} |" for cells, names in modules.items()]
    return _with_table(TARGETS, lines)


def _with_table(page: Path, lines: list[str]) -> str:
    """The text of a page, with `lines` in place of its table."""
    before, _, after = page.read_text().partition(TABLE_BEGIN)
    return "\n".join([before + TABLE_BEGIN, *lines, TABLE_END + after.partition(TABLE_END)[2]])


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    TARGETS.write_text(targets())
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
