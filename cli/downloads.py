"""`dflash-mlx pull`, `list` and `rm`: the models on this disk."""

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
from dflash_mlx.loading.sizes import bytes_beside
from dflash_mlx.machine.facts import bytes_in, cache_folder

from . import options
from .options import MODEL, argument, flag
from .output import make_table, note, print_json, sized, stdout
from .pair import announce, on_hub

REPOSITORY = "A Hugging Face repository (owner/name, for GGUF files owner/name:TYPE)."
NAME = argument(..., REPOSITORY, autocompletion=options.targets_beginning)


def pull(
    *,
    name: str = NAME,
    no_draft: bool = flag("--no-draft", MODEL, "Do not download the drafter."),
    offline: bool = options.OFFLINE,
) -> None:
    """Download a model and its known drafter, and print where they are."""
    local_path(name)  # raises for a wrong name
    if not on_hub(name):
        note(f"{name} is on this disk already.")
        return
    drafter, hub = known_drafter(name), Hub(offline=offline)
    from dflash_mlx.loading.load import find_drafter, find_target  # starts MLX

    _, model = find_target(name, hub, Quantization(4, 64))  # --target-bits 4 may follow
    announce(name, hub)
    names = [name]
    if drafter is None and not no_draft:
        note(f"No drafter is known for {name}: --draft NAME names one. {OTHERWISE}")
    elif drafter is not None and on_hub(drafter) and not no_draft:
        names.append(drafter)
        find_drafter(drafter, hub, model)
        announce(drafter, hub, drafter=True)
    for one in names:
        print(f"{one}  {hub.fetch(one, update=True).path}", flush=True)


def list_(*, json: bool = options.JSON) -> None:
    """List the downloaded models with their sizes."""
    copies = Hub().copies()
    fit = {
        name: fits(size, looks_quantized(name), bytes_beside(name)) for name, size in copies.items()
    }
    if json:
        rows = [{"name": name, "bytes": copies[name], "fits": fit[name]} for name in copies]
        print_json({"models": rows})
        return
    if not copies:
        note("Nothing is downloaded from the hub. 'dflash-mlx pull NAME' downloads.")
        note(f"'tiny' is built in; what pip installed is unpacked in {cache_folder('gguf')}.")
        return
    table = make_table("name", "size", WHETHER)
    for name, size in copies.items():
        table.add_row(name, sized(size), fit[name])
    stdout().print(table)


def _downloaded(incomplete: str) -> list[str]:
    """The downloaded models that a shell may complete a name to."""
    return [name for name in Hub().copies() if name.startswith(incomplete)]


def rm(*, name: str = argument(..., REPOSITORY, autocompletion=_downloaded)) -> None:
    """Delete a downloaded model from this disk."""
    if name == EMBEDDED:
        raise ModelNotFoundError(f"{name} is part of dflash-mlx and cannot be deleted.")
    if name in PACKAGES:
        package, folder = PACKAGES[name][0], cache_folder("gguf")
        unpacked = [*folder.glob(f"{content_name(packaged(name))}*")]
        freed = sum(map(bytes_in, unpacked))
        for one in filter(Path.is_dir, unpacked):
            shutil.rmtree(one)
        note(f"Deleted what {name} unpacked: {sized(freed)} freed. pip uninstall {package}")
        return
    note(f"Deleted {name}: {sized(Hub().remove(name))} freed.")
