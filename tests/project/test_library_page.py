"""The page about the library runs from its first block to its last, typed into one program."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
NEXT = "-- next --"


def test_every_block_runs(tmp_path):
    pytest.importorskip("llguidance")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    program = f"\nprint('{NEXT}')\n".join(blocks)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, stream, gone_on, not_quick, schema, _, turns, many, own = done.stdout.split(NEXT)
    assert "So 47 + 38 = 85." in first
    assert "a quick fox" in stream and "a tiny mouse" in not_quick
    assert "Once upon a time" in stream and not own.strip()
    assert gone_on.strip().startswith("quick fox")
    assert json.loads(schema) == {"lossless": True}
    assert re.search(r"tokens, [1-9]\d* of them read before", turns)
    assert "12 and 30" in many and "Counting from 1 to 9" in many
