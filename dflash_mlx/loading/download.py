"""A download in a process of its own: Ctrl-C ends it at once, and one bar shows it.

The hub's client waits for the end of the file that it reads, and leaves bars of its own open. The
process is this module: it prints one JSON object with the folder, or with the error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, cast

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tqdm import tqdm

from .. import errors
from ..errors import DFlashError, DownloadError, ModelNotFoundError
from ..machine.facts import bytes_in
from ..validation import error_text
from .registry import suggestion

PROGRAM = "dflash_mlx.loading.download"
PAUSE = 0.1  # seconds between two updates of the bar
LEAST = 1e6  # bytes; smaller downloads show no bar
BAR = "{desc} {bar} {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left"
LOGIN = "log in with 'hf auth login'"
# The parents of `HfHubHTTPError` are the errors of its HTTP library, which has changed once.
FAILURES = cast(
    tuple[type[Exception], ...], (OSError, HFValidationError, *HfHubHTTPError.__bases__)
)


class DownloadInterrupt(KeyboardInterrupt):
    """Ctrl-C during a download. What came is kept."""


def download(settings: dict[str, Any], blobs: Path, total: int) -> Path:
    """Download a repository's files, with a bar on a terminal, and return their folder.

    Args:
        settings: the arguments of `huggingface_hub.snapshot_download`, which JSON can hold.
        blobs: the folder where its files grow.
        total: bytes of all files.

    Raises:
        DownloadInterrupt: Ctrl-C.
        DFlashError: what `explained` makes of the client's errors.
    """
    name = settings["repo_id"]
    program = [sys.executable, "-P", "-m", PROGRAM, json.dumps(settings)]
    paths = os.pathsep.join(filter(None, sys.path))
    process = Popen(
        program,
        stdin=PIPE,  # its end tells the process that nobody waits any more
        stdout=PIPE,
        stderr=DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only this process
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        with process:
            try:
                _show(process, name=name, blobs=blobs, total=total)
                assert process.stdout is not None
                output = process.stdout.read()
            finally:
                process.kill()
    except KeyboardInterrupt as error:
        raise DownloadInterrupt(
            f"The download of {name} was stopped. What was downloaded is kept: run this again to "
            "continue."
        ) from error
    if not output:
        raise DownloadError(f"{name}: the download ended without an answer; run this again.")
    answer = json.loads(output)
    if "error" in answer:
        kind: type[DFlashError] = getattr(errors, answer["error"])
        raise kind(answer["message"])
    return Path(answer["folder"])


def _show(process: Popen[bytes], name: str, blobs: Path, total: int) -> None:
    """Show a bar until the process ends."""
    with tqdm(
        desc=name.rpartition("/")[2],
        total=total,
        initial=min(bytes_in(blobs), total),
        unit="B",
        unit_scale=True,
        bar_format=BAR,
        leave=False,
        disable=None if total > LEAST else True,
    ) as bar:
        while process.poll() is None:
            time.sleep(PAUSE)
            bar.update(max(0, min(bytes_in(blobs), total) - bar.n))


@contextmanager
def explained(name: str, endpoint: str | None = None, offline: bool = False) -> Iterator[None]:
    """Turn the hub client's errors about a repository into ours."""
    try:
        yield
    except FAILURES as error:
        raise _explain(name, endpoint=endpoint, offline=offline, error=error) from error


def _explain(name: str, endpoint: str | None, offline: bool, error: Exception) -> DFlashError:
    """Our error for a failed request: what happened and what to do, in one line."""
    hint = suggestion(name)
    hub = endpoint or constants.ENDPOINT
    unreachable = (
        f"cannot reach {hub} ({error_text(error.__cause__ or error)}). Check the network or proxy, "
        "or use --offline with a downloaded model."
    )
    if isinstance(error, GatedRepoError):
        return DownloadError(f"{name} is gated: accept its terms on its page, then {LOGIN}.")
    if isinstance(error, RepositoryNotFoundError):
        problem = f"{hub} has no such repository, or it is private: {LOGIN}"
        return ModelNotFoundError(f"{name}: {problem}.{hint}")
    if isinstance(error, HFValidationError):
        return ModelNotFoundError(f"{name!r} cannot be the name of a repository.")
    if isinstance(error, LocalEntryNotFoundError):
        why = ", and offline mode is on." if offline else f"; {unreachable}"
        return DownloadError(f"{name} is not downloaded, or not completely{why}{hint}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DownloadError(f"{name}: the disk is full; free some of it and run this again.")
    if isinstance(error, HfHubHTTPError) or getattr(error, "filename", None):  # a file's error
        return DownloadError(f"{name}: no answer from {hub} ({error_text(error)}); run this again.")
    return DownloadError(f"{name}: {unreachable}")


def answer(settings: dict[str, Any]) -> dict[str, str]:
    """Download with these settings of `snapshot_download`.

    Returns the folder, or the class and the message of our error.
    """
    try:
        with explained(settings["repo_id"], settings["endpoint"]):
            return {"folder": snapshot_download(**settings)}
    except DFlashError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _end_with_parent() -> None:
    """End when the process that waits for this one has ended."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(answer(json.loads(sys.argv[1]))))
