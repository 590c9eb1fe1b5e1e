"""Every error that a caller can act on. Each is one line that says what is wrong and what to do.

    DFlashError
    ├── MissingDependencyError     a package of an extra is not installed
    ├── SettingsError              a setting is out of range or not supported; also a ValueError
    ├── PromptError                a prompt cannot be used: it is empty, or too long for the context
    ├── ModelNotFoundError         there is no model with this name or path
    ├── DownloadError              the hub cannot be reached, refuses, or the disk is full
    ├── WeightsError               weight files are missing, truncated or do not match their config
    ├── NotEnoughMemoryError       the weights do not fit into this machine, or memory ran out
    ├── ConfigError                a field of a config.json is missing or not understood
    ├── IncompatibleDrafterError   a drafter was made for another target
    ├── UnsupportedTreeError       the target cannot verify draft trees, only chains
    ├── ProposalError              a drafter returned an invalid draft
    ├── KernelError                a Metal kernel does not support these shapes, or fails
    ├── DataError                  a file of prompts, samples or a schema cannot be used
    ├── EngineError                an engine is used after it was closed
    ├── ClusterError               machines that share a model cannot connect, or lost each other
    ├── OutputError                results cannot be written: no permission, no space
    └── ServerError                a server that is measured cannot be reached, or refuses

The command line prints only the message; a traceback is a bug. It exits with 2 for errors that mean
wrong usage (`cli.failures.WRONG_USAGE`), and with 1 for all others.
"""

from __future__ import annotations

import errno
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class DFlashError(Exception):
    """The base class of this package's errors."""

    def __str__(self) -> str:
        """Return the message as one line, even if it quotes a path or a text of several lines."""
        return "".join(map(_in_line, super().__str__()))


def _in_line(character: str) -> str:
    """Escape a character that would break the line or control the terminal."""
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character


class MissingDependencyError(DFlashError):
    """A package of an extra is not installed."""

    @classmethod
    def of(cls, missing: str, extra: str) -> MissingDependencyError:
        """Make the error for what is missing, and name the extra that installs it."""
        return cls(f"{missing}: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'in a clone of dflash-mlx, run pip install -e ".[{extra}]"'


class SettingsError(DFlashError, ValueError):
    """A setting is out of range, unknown or not supported."""


class PromptError(DFlashError):
    """A prompt cannot be used."""


class ModelNotFoundError(DFlashError):
    """There is no model with this name or path."""


class DownloadError(DFlashError):
    """A model cannot be downloaded: no network, no access, no space on the disk."""


class WeightsError(DFlashError):
    """Weight files are missing, truncated or do not match their config."""


class NotEnoughMemoryError(DFlashError):
    """The weights do not fit into this machine's memory, or it ran out."""


class ConfigError(DFlashError):
    """A config.json has a field that is missing or not understood."""


class IncompatibleDrafterError(DFlashError):
    """A drafter was made for another target."""


class UnsupportedTreeError(DFlashError):
    """The target can verify chains, but not draft trees."""


class ProposalError(DFlashError):
    """A drafter returned an invalid draft: wrong anchor, bad parents, too many rows."""


class KernelError(DFlashError):
    """A Metal kernel does not support these shapes or dtypes, or fails."""

    def __str__(self) -> str:
        """Return the message, and what to do."""
        return f'{super().__str__()} kernels="off" (--kernels off) loads a model without ours.'


class EngineError(DFlashError):
    """An engine is used after it was closed, or was closed before a job had ended."""


class ClusterError(DFlashError):
    """Machines that share a model cannot connect, or have lost each other."""


class DataError(DFlashError):
    """A file of prompts, samples or a schema cannot be read, or has a line that cannot be used."""


def error_of_import(error: ValueError) -> DFlashError | None:
    """Return our error if mlx-lm's import failed because too few files may be open, else None."""
    if "raise maximum limit" not in str(error):
        return None
    return DFlashError(
        "mlx-lm needs 4,096 open files, and this process may have fewer: raise its hard limit "
        "(ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)."
    )


class OutputError(DFlashError):
    """Results cannot be written."""

    @classmethod
    def because(cls, path: Path, error: OSError) -> OutputError:
        """Make the error for a file or folder that could not be written because of `error`."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return cls(f"{path}: the disk is full, nothing was written; free some space.")
        return cls(f"{path}: cannot be written ({error.strerror}); choose another path.")


class ServerError(DFlashError):
    """A server that is measured cannot be reached, refuses, or sends an invalid answer."""
