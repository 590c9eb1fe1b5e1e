"""What `generate` imports before it answers: counted, for seconds differ by machine."""

import subprocess
import sys

HEAVY = {
    "matplotlib": "pictures",
    "prompt_toolkit": "the line of chat",
    "rich.progress": "bars",
    "dflash_mlx.train": "training",
    "dflash_mlx.cli.bench": "another command",
    "dflash_mlx.cli.chat": "another command",
    "dflash_mlx.cli.serve": "another command",
    "dflash_mlx.kernels.modules": "kernels, which need Metal",
    "dflash_mlx.loading.gguf.convert": "files of another kind",
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
