"""`dflash-mlx pull`, `list` and `rm`: downloaded models."""

from __future__ import annotations

import shutil
from pathlib import Path

from dflash_mlx.errors import ModelNotFoundError
from dflash_mlx.loading.gguf.gguf_file import content_name
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.memory_check import WHETHER, fits, looks_quantized
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import (
    EMBEDDED,
    OTHERWISE,
    PACKAGES,
    known_drafter,
    local_path,
    packaged,
)
from dflash_mlx.loading.sizes import drafter_and_context_bytes
from dflash_mlx.machine.facts import bytes_in, cache_folder

from . import options
from .options import MODEL, argument, flag
from .output import make_table, note, print_json, sized, stdout
from .pair import announce, on_hub

REPOSITORY = "A Hugging Face repository (owner/name, for GGUF files owner/name:TYPE)."
NAME = argument(..., REPOSITORY, autocompletion=options.complete_target)


def pull(
    *,
    name: str = NAME,
    no_draft: bool = flag("--no-draft", panel=MODEL, help="Do not download the drafter."),
    offline: bool = options.OFFLINE,
) -> None:
    """Download a model and its known drafter, and print where they are."""
    local_path(name)  # raises for a wrong name
    if not on_hub(name):
        note(f"{name} is on this disk already.")
        return
    drafter = known_drafter(name)
    hub = Hub(offline=offline)
    from dflash_mlx.loading.load import find_drafter, find_target  # starts MLX

    # Quantized, because the user may load it with --target-bits 4.
    _, model = find_target(name, hub, Quantization(4, 64))
    announce(name, hub)
    names = [name]
    if drafter is None and not no_draft:
        note(f"No drafter is known for {name}: --draft NAME names one. {OTHERWISE}")
    elif drafter is not None and on_hub(drafter) and not no_draft:
        names.append(drafter)
        find_drafter(drafter, hub, model)
        announce(drafter, hub, drafter=True)
    for repository in names:
        print(f"{repository}  {hub.fetch(repository, update=True).path}", flush=True)


def list_(*, json: bool = options.JSON) -> None:
    """List the downloaded models with their sizes."""
    copies = Hub().copies()
    verdicts = {}  # whether each model fits
    for name, size in copies.items():
        verdicts[name] = fits(size, looks_quantized(name), drafter_and_context_bytes(name))
    if json:
        rows = [{"name": name, "bytes": copies[name], "fits": verdicts[name]} for name in copies]
        print_json({"models": rows})
        return
    if not copies:
        note("Nothing has been downloaded from the hub. 'dflash-mlx pull NAME' downloads a model.")
        note(f"'tiny' is built in; what pip installed is unpacked in {cache_folder('gguf')}.")
        return
    table = make_table("name", "size", WHETHER)
    for name, size in copies.items():
        table.add_row(name, sized(size), verdicts[name])
    stdout().print(table)


def _complete_downloaded(incomplete: str) -> list[str]:
    """Return the downloaded models whose names begin with a text, for completion in a shell."""
    return [name for name in Hub().copies() if name.startswith(incomplete)]


def rm(*, name: str = argument(..., REPOSITORY, autocompletion=_complete_downloaded)) -> None:
    """Delete a downloaded model from this disk."""
    if name == EMBEDDED:
        raise ModelNotFoundError(f"{name} is part of dflash-mlx and cannot be deleted.")
    if name in PACKAGES:
        package = PACKAGES[name][0]
        unpacked = list(cache_folder("gguf").glob(f"{content_name(packaged(name))}*"))
        freed = sum(map(bytes_in, unpacked))
        for folder in filter(Path.is_dir, unpacked):
            shutil.rmtree(folder)
        note(f"Deleted what {name} unpacked: {sized(freed)} freed. pip uninstall {package}")
        return
    note(f"Deleted {name}: {sized(Hub().remove(name))} freed.")
