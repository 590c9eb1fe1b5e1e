"""Modules import only from lower levels. All import statements count, even those for type hints."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dflash_mlx"

# From the bottom up. A module may import the levels below its own, and its own package.
LEVELS = [
    {"errors"},
    {"validation"},
    {
        "constraints",
        "deadline",
        "distributions",
        "machine",
        "metal",
        "smollm2",
        "subclassing",
        "threads",
        "tiny",
        "traces",
    },
    {"chat_template", "events", "kernels", "memory", "settings"},
    {"penalties", "proposal"},
    {"edits"},
    {"accept", "sampling"},
    {"targets"},
    {"drafter"},
    {"prefix"},
    {"pair_caches", "policy", "prompt", "stream", "structured"},
    {"answers", "loading", "request"},
    {"conversation"},
    {"generation"},
    {"loop"},
    {"cluster", "engine"},
    {"dflash_mlx"},  # the public names, which come from all of the above
    {"bench", "serve", "train"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def part_of(name: str) -> str:
    """The part of the package that a module belongs to: its name in `LEVELS`."""
    inside = name.removeprefix("dflash_mlx").lstrip(".")
    while inside and inside not in LEVEL:
        inside = inside.rpartition(".")[0]
    return inside or "dflash_mlx"


def modules() -> dict[str, Path]:
    """The file of every module by its import name. Those of `dflash_mlx.cli` are in cli/."""
    folders = {"dflash_mlx": PACKAGE, "dflash_mlx.cli": ROOT / "cli"}
    folders["dflash_mlx.metal"] = ROOT / "metal"
    paths = {}
    for prefix, folder in folders.items():
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder).with_suffix("").parts
            paths[".".join((prefix, *inside)).removesuffix(".__init__")] = path
    return paths


def imports(name: str, path: Path) -> set[str]:
    """The absolute names that a module imports, anywhere in its text."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join((*base, *filter(None, [node.module])))
            # `from . import loop` names a module, `from .loop import generate` does not.
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_downward():
    wrong = []
    for name, path in modules().items():
        part = part_of(name)
        assert part != "dflash_mlx" or name == "dflash_mlx", f"{name}: give it a level here"
        for imported in imports(name, path):
            top = imported.split(".")[0]
            if top == "cli":
                wrong.append(f"{name}: the command line is dflash_mlx.cli, not {imported}")
            elif top == "dflash_mlx":
                other = part_of(imported)
                if other != part and LEVEL[other] >= LEVEL[part]:
                    wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circular_import():
    """Imports that only type hints need count as well."""
    all_modules = modules()
    needs = {}
    for name, path in all_modules.items():
        needed = {module_of(imported, all_modules) for imported in imports(name, path)}
        needs[name] = needed - {name, None}
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def module_of(imported: str, all_modules: dict[str, Path]) -> str | None:
    """The module of ours that has an imported name. None for others and the public package."""
    while imported and imported not in all_modules:
        imported = imported.rpartition(".")[0]
    return imported if imported != "dflash_mlx" else None


def test_only_the_server_imports_web_packages():
    """They are installed with an extra, which nothing else may need."""
    web = {"prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"}
    for name, path in modules().items():
        if part_of(name) != "serve":
            assert not {imported.split(".")[0] for imported in imports(name, path)} & web, name


def test_nothing_heavy_is_imported_early():
    """`main` first has to handle Ctrl-C and choose the BLAS; only then may slow imports begin."""
    heavy = {"mlx", "mlx_lm", "transformers", "typing", "re", "dataclasses", "ctypes", "contextlib"}
    code = "import sys; before = {*sys.modules}; import dflash_mlx.cli.main;"
    code += f"print({heavy} & ({{*sys.modules}} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr
