"""Every error a caller can act on: one line that says what is wrong and what to do.

    DFlashError
    ├── MissingDependencyError     a package that an extra installs is not there
    ├── SettingsError              a setting out of range or not supported; also a ValueError
    ├── PromptError                a prompt that cannot be used: empty, too long for the context
    ├── ModelNotFoundError         no model under this name or path
    ├── DownloadError              the hub cannot be reached, refuses, or the disk is full
    ├── WeightsError               weight files missing, truncated or not matching their config
    ├── NotEnoughMemoryError       the weights do not fit into this machine
    ├── ConfigError                a config.json with a field that is missing or not understood
    ├── IncompatibleDrafterError   a drafter that was made for another target
    ├── UnsupportedCacheError      a cache kind that cannot be rolled back
    ├── UnsupportedTreeError       a draft tree for a target that reads chains only
    ├── ProposalError              a drafter handed over something that is not a draft
    ├── KernelError                shapes or dtypes that a Metal kernel does not take
    ├── DataError                  a file of prompts, samples or a schema that cannot be used
    ├── EngineError                an engine that was closed is asked for more
    ├── ClusterError               machines that share a model have lost each other, or cannot meet
    ├── OutputError                results cannot be written: no permission, no room, in the way
    └── ServerError                a server that is measured cannot be reached, or refuses

The command line prints the message and nothing else; a traceback is a bug. It exits with 2 where
the class says that what was asked for is wrong (`cli.app.WRONG_USAGE`), and with 1 for all others.
"""

from __future__ import annotations

import errno
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class DFlashError(Exception):
    """The parent of every error this package raises on purpose."""

    def __str__(self) -> str:
        """The message in one line: a path or a library's words in it may have several."""
        return "".join(map(_in_line, super().__str__()))


def _in_line(character: str) -> str:
    """A character, escaped if it would break the line or steer the terminal."""
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character


class MissingDependencyError(DFlashError):
    """A package that an extra installs is missing."""

    @classmethod
    def of(cls, missing: str, extra: str) -> MissingDependencyError:
        """What is missing, and the extra that installs it."""
        return cls(f"{missing}: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """What to run. The package index has another project under our name, so its name is no help."""
    return f'in a clone of dflash-mlx, run pip install -e ".[{extra}]"'


class SettingsError(DFlashError, ValueError):
    """A setting is out of range, unknown or not supported."""


class PromptError(DFlashError):
    """A prompt that cannot be used."""


class ModelNotFoundError(DFlashError):
    """No model under this name or path."""


class DownloadError(DFlashError):
    """A model cannot be fetched: no network, no access, no room on the disk."""


class WeightsError(DFlashError):
    """Weight files are missing, truncated or do not match their config."""


class NotEnoughMemoryError(DFlashError):
    """The weights do not fit into this machine's memory."""


class ConfigError(DFlashError):
    """A config.json has a field that is missing or not understood."""


class IncompatibleDrafterError(DFlashError):
    """A drafter was made for another target."""


class UnsupportedCacheError(DFlashError):
    """A cache of the target cannot be rolled back."""


class UnsupportedTreeError(DFlashError):
    """The target cannot read a draft tree; chains it can."""


class ProposalError(DFlashError):
    """What a drafter proposed is not a draft: wrong anchor, bad parents, too many rows."""


class KernelError(DFlashError):
    """A Metal kernel was called with shapes or dtypes that it does not take."""


class EngineError(DFlashError):
    """An engine that was closed is asked for more, or was closed before a job had ended."""


class ClusterError(DFlashError):
    """Machines that share a model cannot meet, or have lost each other."""


class DataError(DFlashError):
    """A file of prompts, samples or a schema cannot be read, or has a line that cannot be used."""


class OutputError(DFlashError):
    """Results cannot be written where they should go."""

    @classmethod
    def because(cls, path: Path, error: OSError) -> OutputError:
        """What to say when `error` kept a file or folder from being written."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return cls(f"{path}: the disk is full, nothing was written; free some of it.")
        return cls(f"{path}: cannot be written ({error.strerror}); choose another place.")


class ServerError(DFlashError):
    """A server that is measured cannot be reached, refuses, or does not answer as it should."""
