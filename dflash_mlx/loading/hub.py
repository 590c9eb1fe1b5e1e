"""Models of the Hugging Face hub, through huggingface-hub's own client and cache.

A complete copy is used without a question to the hub. The client resumes broken downloads. This
module asks only for the files that a model needs, and turns failures into one-line errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import filter_repo_objects, get_session

from ..errors import DFlashError, DownloadError, ModelNotFoundError, WeightsError
from ..validation import error_text, user_path
from .download import FAILURES, download, explained
from .folder import INDEX, Folder, RemoteFolder
from .gguf.gguf_file import GGUFFile
from .registry import Part, hub_gguf, local_path

# What mlx-lm reads of a repository.
WEIGHTS = ["*.safetensors"]
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
WANTED = [*SMALL_FILES, *WEIGHTS]
PING_SECONDS = 5.0
# The quantization that a GGUF file's name ends with, maybe before the number of its part.
_GGUF_TYPE = re.compile(
    r"[-./]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|F32|MXFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf", re.I
)


@dataclass(frozen=True)
class Hub:
    """A client of the hub.

    Attributes:
        endpoint: the hub's address, None for the public one.
        cache: the folder of downloads, None for huggingface-hub's own.
        offline: use downloaded copies only.
    """

    endpoint: str | None = None
    cache: Path | None = None
    offline: bool = False
    # The files of a repository and their bytes, once the hub was asked for them.
    _listed: dict[str, dict[str, int]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def url(self) -> str:
        """The hub's address."""
        return self.endpoint or constants.ENDPOINT

    @property
    def folder(self) -> Path:
        """Where downloads go."""
        return user_path(self.cache or constants.HF_HUB_CACHE).absolute()

    def ping(self) -> float:
        """Seconds until the hub answers. Raises `DownloadError` after a few without an answer."""
        start = time.perf_counter()
        try:
            get_session().head(self.url, timeout=PING_SECONDS)
        except FAILURES as error:
            raise DownloadError(f"{self.url} cannot be reached ({error_text(error)}).") from error
        return time.perf_counter() - start

    def find(self, name: str) -> Folder:
        """A repository on this disk, else its `RemoteFolder`. Raises as `fetch`."""
        copy = self.copy(name)
        if copy is not None or self.offline:
            return copy or self.fetch(name)
        if hub_gguf(name) is not None:  # the hub is asked only for the size, if that is needed
            return RemoteFolder(Path(name), name, partial(self.remote_bytes, name))
        folder = self._snapshot(name, ["config.json", INDEX])
        if not (folder / "config.json").is_file() and self._gguf_types(name):
            raise self._no_gguf(name)
        return RemoteFolder(folder, name, partial(self.remote_bytes, name, ["model*.safetensors"]))

    def fetch(self, name: str, weights: Sequence[str] = WEIGHTS, update: bool = False) -> Folder:
        """The folder of a repository (owner/name), downloaded unless it is there already.

        For a GGUF file in a repository (owner/name:Q4_K_M) the file, or the first of its parts.

        Args:
            name: the repository, or the file in it.
            weights: patterns of the weight files, if others are not needed.
            update: ask the hub for a newer revision even if there is a complete copy.

        Raises:
            ModelNotFoundError: the hub has no such repository, or it has no such file.
            DownloadError: no network and no copy, no access, or no room on the disk.
        """
        copy = None if self.offline or update else self.copy(name)
        if copy is not None:
            return copy
        gguf = hub_gguf(name)
        if gguf is None:
            return Folder(self._snapshot(name, [*SMALL_FILES, *weights]), name)
        patterns = _gguf_files(gguf[1])
        folder = self._snapshot(gguf[0], patterns)
        files = [file for file in folder.rglob("*.gguf") if any(map(file.match, patterns))]
        # Projectors for images are not the model.
        files = [file for file in files if not file.name.startswith("mmproj")]
        if not files:
            raise self._no_gguf(*gguf)
        # The plainest name, or the first part of a split file.
        return GGUFFile(min(files, key=lambda file: (len(file.name), file.name)), name)

    def copy(self, name: str) -> Folder | None:
        """The complete copy of a repository or GGUF file on this disk; None without one."""
        try:
            folder = Hub(self.endpoint, self.cache, offline=True).fetch(name)
            _ = folder.files
        except (DownloadError, ModelNotFoundError, WeightsError):
            return None
        return folder

    def fetch_data(self, name: str, file: str) -> Path:
        """One file of a data set (owner/name), downloaded unless it is there already.

        Raises the errors of `fetch`.
        """
        with explained(name, self.endpoint, self.offline):
            where = self._where | {"local_files_only": self.offline}
            return Path(hf_hub_download(name, file, repo_type="dataset", **where))

    def downloaded(self, name: str) -> int | None:
        """Bytes of a repository's copy on this disk, None without a complete one."""
        copy = self.copy(name)
        if copy is None:
            return None
        files = list(copy.path.rglob("*")) or copy.files  # a GGUF file has none below it
        return sum(file.stat().st_size for file in files if file.is_file())

    def copies(self) -> dict[str, int]:
        """Every model with a complete copy on this disk, and its bytes."""
        try:
            cached = scan_cache_dir(self.cache).repos
        except CacheNotFound:
            return {}
        sizes: dict[str, int] = {}
        for name in sorted(repo.repo_id for repo in cached if repo.repo_type == "model"):
            size = self.downloaded(name)
            if size is not None:
                sizes[name] = size
        return sizes

    def remote_bytes(self, name: str, wanted: Sequence[str] = WANTED) -> int:
        """Bytes of a repository's files that `fetch` would bring. Raises as `fetch`."""
        gguf = hub_gguf(name)
        if gguf is not None:
            name = gguf[0]
            wanted = _gguf_files(gguf[1])
        sizes = self._sizes(name)
        names = list(filter_repo_objects(sizes, allow_patterns=list(wanted)))
        if gguf is not None and not names:
            raise self._no_gguf(*gguf)
        return sum(sizes[file] for file in names)

    def remove(self, name: str) -> int:
        """Delete a repository's copy, complete or not. Returns the bytes that are free again.

        Raises `ModelNotFoundError` without one.
        """
        name, _ = hub_gguf(name) or (name, "")
        with suppress(CacheNotFound):
            cache = scan_cache_dir(self.cache)
            copies = [repo for repo in cache.repos if repo.repo_id == name]
            revisions = [revision.commit_hash for repo in copies for revision in repo.revisions]
            if revisions:
                strategy = cache.delete_revisions(*revisions)
                strategy.execute()
                return strategy.expected_freed_size
        raise ModelNotFoundError(f"{name} is not downloaded; 'dflash-mlx list' shows what is.")

    @property
    def _where(self) -> dict[str, Any]:
        """The hub and the cache, as arguments of huggingface-hub's functions."""
        return {"endpoint": self.endpoint, "cache_dir": str(self.folder)}

    def _sizes(self, name: str) -> dict[str, int]:
        """A repository's files and their bytes, asked for once. Raises as `fetch`."""
        if name not in self._listed:
            with explained(name, self.endpoint, self.offline):
                info = HfApi(self.endpoint).model_info(name, files_metadata=True, timeout=10)
            self._listed[name] = {file.rfilename: file.size or 0 for file in info.siblings or []}
        return self._listed[name]

    def _gguf_types(self, name: str) -> list[str]:
        """The quantizations of a repository's GGUF files; none without an answer."""
        types: set[str] = set()
        with suppress(DFlashError):
            types = {match[1] for match in map(_GGUF_TYPE.search, self._sizes(name)) if match}
        return sorted(types)

    def _no_gguf(self, name: str, kind: str | None = None) -> ModelNotFoundError:
        """The error for a quantization that a repository lacks, or that its name leaves open."""
        lacks = f"GGUF file in {kind}" if kind else "config.json"
        types = ", ".join(self._gguf_types(name))
        advice = f"name one of its types, as {name}:TYPE: {types}" if types else "see its page"
        return ModelNotFoundError(f"{name} has no {lacks}: {advice}.")

    def _snapshot(self, name: str, wanted: list[str]) -> Path:
        """A repository's folder with the files that are wanted."""
        settings = self._where | {"repo_id": name, "allow_patterns": wanted}
        if self.offline:
            with explained(name, self.endpoint, self.offline):
                return Path(snapshot_download(**settings, local_files_only=True))
        total = 0
        with suppress(DownloadError):  # the client uses what it has without a network
            total = self.remote_bytes(name, wanted)
        blobs = self.folder / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
        return download(settings, blobs, total)


def find(name: str, hub: Hub, part: Part = "target") -> Folder:
    """The folder or GGUF file that a model's name means: on this disk, else on the hub.

    Raises the errors of `local_path` and `Hub.find`.
    """
    path = local_path(name, part)
    if path is None:
        return hub.find(name)
    return GGUFFile(path, name) if path.is_file() else Folder(path, name)


def _gguf_files(quantization: str) -> list[str]:
    """Patterns of the files of a quantization, whole or in parts."""
    kinds = {quantization, quantization.upper(), quantization.lower()}
    return [f"*{kind}{end}.gguf" for kind in sorted(kinds) for end in ("", "-?????-of-?????")]
