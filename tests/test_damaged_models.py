"""Folders damaged in a thousand ways end in one line or in the right text, never in a traceback.

    python tests/test_damaged_models.py [FIRST [COUNT]]

runs further ways: COUNT of each family (200) from seed FIRST (0) on.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from damage import FAMILIES

WAYS = 200  # of each family


def ends(place: Path, family: str, seeds: range) -> Iterator[tuple[str, str]]:
    """What was damaged in each of these ways, and how it ended."""
    left = [str(seed) for seed in seeds]
    while left:
        worker = Path(__file__).with_name("damage_worker.py")
        command = [sys.executable, str(worker), str(place), family, *left]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        for begun, ended in zip(lines[::2], lines[1::2], strict=False):
            yield begun["damage"], ended["outcome"]
        if len(lines) % 2:  # the way that ended the worker, too
            yield lines[-1]["damage"], f"exit code {done.returncode}, {done.stderr[-500:]}"
        left = left[-(-len(lines) // 2) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_folder_is_one_line_or_the_right_text(family, tmp_path):
    outcomes = list(ends(tmp_path, family, range(WAYS)))
    wrong = [(damage, end) for damage, end in outcomes if end not in ("line", "text")]
    assert not wrong, "\n".join(f"{damage}\n    {end}" for damage, end in wrong)
    assert len(outcomes) == WAYS
    kinds = [end for _, end in outcomes]
    assert kinds.count("line") > WAYS // 2 and kinds.count("text") > WAYS // 20


if __name__ == "__main__":
    first, count = ([*map(int, sys.argv[1:]), *(0, WAYS)[len(sys.argv) - 1 :]])[:2]
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            found = list(ends(Path(folder), family, range(first, first + count)))
        bad = [(damage, end) for damage, end in found if end not in ("line", "text")]
        print(f"{family}: {len(found)} ways, {len(bad)} ended otherwise")
        for damage, end in bad:
            print(f"  {damage}\n    {end}")
