"""What is installed is what is on disk: editable and wheel, with and without MLX."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import dflash_mlx

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Each folder of the repository, and where it lies when installed (dflash_mlx/ has links to it).
FOLDERS = {
    "dflash_mlx": Path("dflash_mlx"),
    "cli": Path("dflash_mlx/cli"),
    "metal": Path("dflash_mlx/metal"),
}
# Begins a program in which the packages of the extra "mlx" cannot be imported.
NO_MLX = "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None;"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it printed; it has no input."""
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL, timeout=300
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The path of the wheel, built without a network by the tools of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools would leave its build/ behind in ours
    source.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for name, inside in FOLDERS.items():
        if str(inside) != name:
            (source / inside).parent.mkdir(exist_ok=True)
            (source / inside).symlink_to(os.readlink(ROOT / inside))
        for path in files_of(name):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    done = run(sys.executable, "-m", "pip", "wheel", *options, str(source), cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a new environment with the wheel; other packages come from ours."""
    home = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", "--without-pip", str(home), cwd=home).returncode == 0
    python = home / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(str(python), "-c", code, cwd=home).stdout.strip())
    # The folder that a .pth file names is searched after the wheel, and its own .pth files, such as
    # that of our editable install, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    done = run(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=home)
    assert done.returncode == 0, done.stderr
    return python.parent


def files_of(folder: str) -> list[Path]:
    """The files of a package folder, without caches of Python and hidden files of the system."""
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return [p for p in files if "__pycache__" not in p.parts and not p.name.startswith(".")]


def test_the_package_list_is_complete():
    on_disk = set()
    for folder, inside in FOLDERS.items():
        for path in files_of(folder):
            if path.name == "__init__.py":  # without it an editable install lacks the package
                below = path.parent.relative_to(ROOT / folder)
                on_disk.add(".".join((inside / below).parts))
            assert path.suffix != ".py" or (path.parent / "__init__.py").exists()
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == on_disk


def test_the_wheel_holds_every_file(wheel):
    on_disk = {
        str(inside / path.relative_to(ROOT / folder))
        for folder, inside in FOLDERS.items()
        for path in files_of(folder)
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == on_disk
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_generates_outside_the_repository(installed, tmp_path):
    code = "import dflash_mlx; print(dflash_mlx.__file__)"
    imported = run(str(installed / "python"), "-c", code, cwd=tmp_path)
    assert Path(imported.stdout.strip()).is_relative_to(installed.parent), imported.stderr
    command = (str(installed / "dflash-mlx"), "generate", "What is 12 plus 7?")
    done = run(*command, "--max-tokens", "8", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"] and 1 <= len(result["tokens"]) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("install", ["editable", "wheel"])
def test_type_checkers_find_the_package(install, request, tmp_path_factory):
    """mypy accepts a correct program and finds every mistake in the calls of another."""
    python = sys.executable
    if install == "wheel":
        python = str(request.getfixturevalue("installed") / "python")
    programs = ROOT / "tests" / "data" / "types"
    cache = str(tmp_path_factory.getbasetemp() / "mypy")
    command = (sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", cache)
    done = run(*command, "--python-executable", python, "good.py", "bad.py", cwd=programs)
    errors = re.findall(r"^(\S+):(\d+): error:", done.stdout, re.MULTILINE)
    lines = (programs / "bad.py").read_text().splitlines()
    calls = [number for number, line in enumerate(lines, 1) if "generate(" in line]
    assert len(calls) == 5
    assert errors == [("bad.py", str(line)) for line in calls], done.stdout


def test_without_mlx_the_package_imports_and_says_what_to_install(tmp_path):
    code = NO_MLX + "import dflash_mlx as dm; print(dm.__version__, dm.DraftConfig.__name__)"
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout == "0.1.0 DraftConfig\n"
    code = NO_MLX + (
        "import dflash_mlx as dm\n"
        "try: dm.generate\n"
        "except dm.MissingDependencyError as error: print(error)"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout.count("\n") == 1 and 'pip install -e ".[mlx]"' in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["generate hello", "bench", "chat"])
def test_without_mlx_the_command_line_says_what_to_install(command, tmp_path):
    code = NO_MLX + f"sys.argv = ['dflash-mlx', *{command.split()}];"
    code += "from dflash_mlx.cli.main import main; main()"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 1 and not done.stdout
    message = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr).strip()  # without colours
    assert 'pip install -e ".[mlx]"' in message and "\n" not in message


def test_the_extras_have_both_bounds():
    for requirement in SETTINGS["project"]["optional-dependencies"]["mlx"]:
        assert ">=" in requirement and ",<" in requirement, requirement


# A command (pip, pipx, uv) that installs dflash-mlx or dflash-lossless by name alone: not "NAME @
# address", and not as a part of a path or of a longer name. On the package index, `dflash-mlx` is
# another project; ours is not published.
BY_NAME = re.compile(
    r"\b(?:pipx?3?|uv)\b[^\n]*\b(?:install|add|download|wheel)\b[^\n]*[\s\"']dflash[-_](?:mlx|lossless)"
    r"(?:\[[\w, ]*\])?(?!\s*@|[\w./\[-])",
    re.IGNORECASE,
)
WARNING = "`pip install dflash-mlx` is another project"
FOLDERS_OF_TEXT = ("cli", "dflash_mlx", "docs", "metal", "scripts", ".github")


def test_no_page_tells_users_to_install_from_the_package_index():
    """Everything installs from a clone or an address; only README's warning has the bare name."""
    assert WARNING in (ROOT / "README.md").read_text()
    texts = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "CITATION.cff"]
    for folder in FOLDERS_OF_TEXT:
        kinds = {".md", ".py", ".sh", ".toml", ".yml"}
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    assert len(texts) > 100
    mentions = {path: BY_NAME.search(path.read_text().replace(WARNING, "")) for path in texts}
    installs = [f"{path}: {match[0]}" for path, match in mentions.items() if match]
    assert not installs, "\n".join(installs)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert {"message", "title", "authors"} <= set(citation)  # what the format demands
    assert citation["version"] == dflash_mlx.__version__
    assert citation["license"] == SETTINGS["project"]["license"]


def test_package_workflow_and_makefile_name_the_same_pythons():
    prefix = "Programming Language :: Python :: 3."
    classifiers = SETTINGS["project"]["classifiers"]
    promised = {
        f"3.{classifier.removeprefix(prefix)}"
        for classifier in classifiers
        if classifier.startswith(prefix)
    }
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "linux.yml").read_text())
    assert promised == set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"])
    oldest = SETTINGS["project"]["requires-python"].removeprefix(">=")
    assert oldest in promised
    for file in ("Makefile", ".ci/run"):
        assert promised <= set(re.findall(r"3\.\d\d", (ROOT / file).read_text())), file
