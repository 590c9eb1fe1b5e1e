"""A download in a process of its own: Ctrl-C ends it at once, and one bar shows it.

The hub's client waits for the end of the file that it reads, and leaves bars of its own open.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from tqdm import tqdm

from .. import errors
from ..errors import DownloadError

PROGRAM = "dflash_mlx.loading.download_process"
PAUSE = 0.1  # seconds between two looks at the bytes that came
LEAST = 1e6  # bytes that take a while
BAR = "{desc} {bar} {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left"


class DownloadInterrupt(KeyboardInterrupt):
    """Ctrl-C during a download. What came is kept."""


def download(settings: dict[str, Any], blobs: Path, total: int) -> Path:
    """Download a repository's files, with a bar on a terminal, and return their folder.

    Args:
        settings: of `huggingface_hub.snapshot_download`, as JSON has them.
        blobs: the folder where its files grow.
        total: bytes of all files; few show no bar.

    Raises:
        DownloadInterrupt: Ctrl-C.
        DFlashError: what `Hub.explained` makes of the client's errors.
    """
    name = settings["repo_id"]
    program = [sys.executable, "-P", "-m", PROGRAM, json.dumps(settings)]
    paths = os.pathsep.join(filter(None, sys.path))
    process = Popen(
        program,
        stdin=PIPE,  # its end tells the process that nobody waits any more
        stdout=PIPE,
        stderr=DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process alone
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        with process:
            try:
                _show(process, name, blobs, total)
                assert process.stdout is not None
                told = process.stdout.read()
            finally:
                process.kill()
    except KeyboardInterrupt as error:
        raise DownloadInterrupt(
            f"The download of {name} is stopped. What came is kept: run this again to go on."
        ) from error
    if not told:
        raise DownloadError(f"{name}: the download ended without an answer; run this again.")
    answer = json.loads(told)
    if "error" in answer:
        kind: type[errors.DFlashError] = getattr(errors, answer["error"])
        raise kind(answer["message"])
    return Path(answer["folder"])


def _show(process: Popen[bytes], name: str, blobs: Path, total: int) -> None:
    """Show a bar until the process ends."""
    with tqdm(
        desc=name.rpartition("/")[2],
        total=total,
        initial=min(_bytes(blobs), total),
        unit="B",
        unit_scale=True,
        bar_format=BAR,
        leave=False,
        disable=None if total > LEAST else True,
    ) as bar:
        while process.poll() is None:
            time.sleep(PAUSE)
            bar.update(max(0, min(_bytes(blobs), total) - bar.n))


def _bytes(blobs: Path) -> int:
    """Bytes of the files that are there, also of unfinished ones."""
    return sum(file.stat().st_size for file in blobs.glob("*")) if blobs.is_dir() else 0
