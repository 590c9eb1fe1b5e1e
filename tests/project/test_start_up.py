"""What `generate` does before it answers: its imports and its warnings."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program import hear_ctrl_c, start

import dflash_mlx
import dflash_mlx.errors

# Modules that an answer must not import, and what they are for.
HEAVY = {
    "prompt_toolkit": "the input line of chat",
    "rich.progress": "progress bars",
    "dflash_mlx.train": "training",
    "dflash_mlx.cli.bench": "another command",
    "dflash_mlx.cli.chat": "another command",
    "dflash_mlx.cli.serve": "another command",
    "dflash_mlx.kernels.modules": "kernels, which need Metal",
    "dflash_mlx.loading.gguf.conversion": "files of another kind",
    "mlx_lm.server": "serving",
    "fastapi": "serving",
    "datasets": "training data",
}


def test_an_answer_imports_nothing_that_it_does_not_need():
    command = [sys.executable, "-X", "importtime", "-m", "dflash_mlx", "generate", "hi", "-n", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "dflash_mlx.loop" in imported and done.stdout.strip(), "an answer was given"
    assert not imported & HEAVY.keys()


def test_too_few_open_files_are_an_error_of_ours(monkeypatch):
    """mlx-lm raises the limit when it is imported, which a system may refuse."""

    def refused(*arguments):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(importlib, "import_module", refused)
    with pytest.raises(dflash_mlx.errors.DFlashError, match="4,096 open files"):
        dflash_mlx.load  # noqa: B018


def test_a_warning_is_one_line_without_code(tmp_path):
    """Python would add the line of code that warns, which tells a user nothing."""
    folder = shutil.copytree(Path(dflash_mlx.__path__[0]) / "tiny" / "drafter", tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    config["num_target_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    done = start("generate", "hi", "--draft", folder, "--no-policy", "--max-tokens", "3")
    assert done.returncode == 0 and "warn" not in done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if "another target's" in line)
    assert warning.startswith(
        "dflash-mlx: the drafter may be another target's: its num_target_layers"
    )


def test_ctrl_c_in_an_import_ends_the_program_quietly(tmp_path):
    """Libraries lose an exception in the middle of an import, or print it."""
    # A module that is interrupted, and raises another exception instead.
    module = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nfinally:\n    0 / 0"
    (tmp_path / "mlx_lm.py").write_text(module)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = start("generate", "hi", env=environment, preexec_fn=hear_ctrl_c)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
