"""Who may import whom: only downward. The import statements are read, type hints' included."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dflash_mlx"

# From the bottom up. A module may import the levels below its own, and its own package.
LEVELS = [
    {"errors"},
    {"quantization"},
    {"blas", "chips", "config", "events", "folders", "metal", "registry", "sharpness", "tiny"}
    | {"weights"},
    {"hub"},
    {"kernels"},
    {"proposal"},
    {"accept", "sampling"},
    {"target"},
    {"costs", "drafter"},
    {"conversation", "policy", "prompt", "stream", "structured", "tree_costs"},
    {"tree_policy"},
    {"loading", "rounds"},
    {"loop"},
    {"dflash_mlx"},  # the public names, which come from all of the above
    {"bench", "train"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def modules() -> dict[str, Path]:
    """Every module by the name it is imported under: `dflash_mlx.cli.main` lies in cli/."""
    folders = {"dflash_mlx": PACKAGE, "dflash_mlx.cli": ROOT / "cli"}
    folders["dflash_mlx.metal"] = ROOT / "metal"
    found = {}
    for prefix, folder in folders.items():
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder).with_suffix("").parts
            found[".".join((prefix, *inside)).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """The absolute names that a module imports, anywhere in its text."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join((*base, *filter(None, [node.module])))
            # `from . import loop` names a module, `from .loop import generate` does not.
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_downward():
    wrong = []
    for name, path in modules().items():
        own = name.split(".")[1] if "." in name else name
        assert own in LEVEL, f"{name}: give it a level in {__file__}"
        for imported in imports(name, path):
            parts = imported.split(".")
            if parts[0] == "cli":
                wrong.append(f"{name}: the command line is dflash_mlx.cli, not {imported}")
            elif parts[0] == "dflash_mlx":
                below = next((part for part in parts[1:2] if part in LEVEL), "dflash_mlx")
                if below != own and LEVEL[below] >= LEVEL[own]:
                    wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_nothing_heavy_is_imported_early():
    """MLX comes after the BLAS, so neither the package nor the command line may import it."""
    code = (
        "import sys, dflash_mlx.cli.main; print({'mlx', 'mlx_lm', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr
