"""Models from the Hugging Face hub, through huggingface-hub's own client and cache.

The client shows progress on stderr, takes up a broken connection where it broke, keeps the files
that are whole, and falls back to a downloaded copy without a network. This file asks for what a
model needs and no more, looks at the disk before gigabytes are on their way, and says what went
wrong in one line.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from ..errors import DFlashError, DownloadError, ModelNotFoundError, WeightsError
from ..machine.folders import nearest_there
from .names import meant
from .registry import Pair, pairs
from .weights import GB, check_safetensors

# What mlx-lm reads of a repository; the original weights in other formats stay where they are.
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
WEIGHTS = ["*.safetensors"]
PATIENCE = 5.0  # seconds that a ping may take
# The parents of `HfHubHTTPError` are what its HTTP library raises; it has had more than one.
FAILURES = cast(
    tuple[type[Exception], ...], (OSError, HFValidationError, *HfHubHTTPError.__bases__)
)


@dataclass(frozen=True)
class Hub:
    """Where models come from.

    Attributes:
        endpoint: the hub's address, None for the public one.
        cache: the folder of downloads, None for huggingface-hub's own.
        offline: use downloaded copies alone.
    """

    endpoint: str | None = None
    cache: Path | None = None
    offline: bool = False

    @property
    def url(self) -> str:
        """The hub's address."""
        return self.endpoint or constants.ENDPOINT

    @property
    def folder(self) -> Path:
        """Where downloads go."""
        return (self.cache or Path(constants.HF_HUB_CACHE)).expanduser().absolute()

    def ping(self) -> float:
        """Seconds until the hub answers. Raises `DownloadError` when it does not within a few."""
        start = time.perf_counter()
        try:
            with urlopen(Request(self.url, method="HEAD"), timeout=PATIENCE):
                return time.perf_counter() - start
        except HTTPError as error:  # any answer is one
            error.close()
            return time.perf_counter() - start
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise DownloadError(f"{self.url} cannot be reached ({reason}).") from error

    def fetch(self, name: str) -> Path:
        """The local folder of a repository (owner/name), downloaded unless it is there already.

        Raises:
            ModelNotFoundError: the hub has no such repository.
            DownloadError: no network and no copy, no access, or no room on the disk.
        """
        try:
            if not self.offline:
                self._check_room(name)
            return self._snapshot(name, self.offline)
        except FAILURES as error:
            raise self._explain(name, error) from error

    def config(self, name: str) -> Path:
        """The folder of a repository with its config.json, and perhaps nothing else of it.

        Raises as `fetch`.
        """
        try:
            return self._snapshot(name, self.offline, ["config.json"])
        except FAILURES as error:
            raise self._explain(name, error) from error

    def fetch_data(self, name: str, file: str) -> Path:
        """One file of a data set (owner/name), downloaded unless it is there already.

        Raises the errors of `fetch`.
        """
        try:
            return Path(
                hf_hub_download(
                    name,
                    file,
                    repo_type="dataset",
                    endpoint=self.endpoint,
                    cache_dir=self.cache,
                    local_files_only=self.offline,
                )
            )
        except FAILURES as error:
            raise self._explain(name, error) from error

    def downloaded(self, name: str) -> int | None:
        """Bytes of a repository's copy on this disk, None when there is no whole one."""
        try:
            folder = self._snapshot(name, offline=True)
            check_safetensors(folder)
        except WeightsError:
            return None
        except FAILURES:
            return None
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def copies(self) -> dict[str, int]:
        """Every model that has a whole copy on this disk, and the bytes of it."""
        try:
            cached = scan_cache_dir(self.cache).repos
        except CacheNotFound:
            return {}
        names = sorted(repo.repo_id for repo in cached if repo.repo_type == "model")
        sizes = {name: self.downloaded(name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def remote_bytes(self, name: str, wanted: Sequence[str] = WANTED) -> int:
        """Bytes of a repository's files that `fetch` would bring. Raises as `fetch`."""
        try:
            sizes = self._sizes(name)[0]
        except FAILURES as error:
            then = "run this again when it answers"
            raise self._explain(name, error, "cannot be asked", then) from error
        return sum(sizes[file] for file in filter_repo_objects(sizes, allow_patterns=list(wanted)))

    def remove(self, name: str) -> int:
        """Delete a repository's copy, whole or not; the bytes that are free again.

        Raises `ModelNotFoundError` without one.
        """
        try:
            cache = scan_cache_dir(self.cache)
        except CacheNotFound as error:
            raise ModelNotFoundError(f"{name} is not downloaded: nothing is.") from error
        copies = [repo for repo in cache.repos if repo.repo_id == name]
        revisions = [one.commit_hash for repo in copies for one in repo.revisions]
        if not revisions:
            there = ", ".join(sorted(repo.repo_id for repo in cache.repos)) or "nothing"
            raise ModelNotFoundError(f"{name} is not downloaded; what is: {there}.")
        strategy = cache.delete_revisions(*revisions)
        strategy.execute()
        return strategy.expected_freed_size

    def _sizes(self, name: str) -> tuple[dict[str, int], str | None]:
        """Bytes by file of a repository, and its newest revision, as the hub says."""
        listed = HfApi(endpoint=self.endpoint).model_info(name, files_metadata=True, timeout=10)
        return {file.rfilename: file.size or 0 for file in listed.siblings or []}, listed.sha

    def _snapshot(self, name: str, offline: bool, wanted: Sequence[str] = WANTED) -> Path:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(wanted),
                endpoint=self.endpoint,
                cache_dir=self.cache,
                local_files_only=offline,
            )
        )

    def _check_room(self, name: str) -> None:
        """Raise `DownloadError` when what is missing of a repository cannot fit on the disk."""
        try:
            sizes, revision = self._sizes(name)
        except RepositoryNotFoundError:
            raise
        except FAILURES:
            return  # no network, or a hub in trouble: a downloaded copy may do
        missing = [
            file
            for file in filter_repo_objects(sizes, allow_patterns=WANTED)
            if not isinstance(try_to_load_from_cache(name, file, self.cache, revision), str)
        ]
        needed = sum(sizes[file] for file in missing)
        folder = self.folder
        free = shutil.disk_usage(nearest_there(folder)).free
        if needed > free:
            raise DownloadError(
                f"{name}: {needed / GB:.1f} GB are to be downloaded and {folder} has room for "
                f"{free / GB:.1f}: free some of the disk."
            )

    def _explain(
        self,
        name: str,
        error: Exception,
        failed: str = "does not give it",
        then: str = "run this again, what is there is kept",
    ) -> DFlashError:
        """What a failed download means for a person, in a line: what the hub did, what to do."""
        hub = self.endpoint or "the hub"
        if isinstance(error, GatedRepoError):
            return DownloadError(
                f"{name} is gated: accept its terms on its page, then log in with 'hf auth login'."
            )
        if isinstance(error, RepositoryNotFoundError):
            return ModelNotFoundError(
                f"{name}: {hub} has no such repository, or it is private and needs 'hf auth login'."
                + meant(name)
            )
        if isinstance(error, HFValidationError):
            return ModelNotFoundError(f"{name!r} cannot be the name of a repository.")
        if isinstance(error, LocalEntryNotFoundError):
            where = "and offline mode is on" if self.offline else f"and {hub} cannot be reached"
            return DownloadError(f"{name} is not downloaded, or not wholly, {where}.{meant(name)}")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return DownloadError(f"{name}: the disk is full; free some of it and run this again.")
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
        return DownloadError(f"{name}: {hub} {failed} ({reason}); {then}.")


@dataclass(frozen=True)
class Listing:
    """A pair of the registry and what of it is on this disk.

    Attributes:
        pair: the drafter and its target.
        copies: downloaded repositories of the target and their bytes, its conversions included.
        drafter_bytes: the size of the downloaded drafter, None without one.
    """

    pair: Pair
    copies: dict[str, int]
    drafter_bytes: int | None


def listings(hub: Hub | None = None) -> list[Listing]:
    """Every pair of the registry with what is downloaded; reads this disk alone."""
    found = (hub or Hub()).copies()
    return [
        Listing(
            pair=pair,
            copies={name: size for name, size in found.items() if pair.matches(name)},
            drafter_bytes=found.get(pair.drafter),
        )
        for pair in pairs()
    ]
