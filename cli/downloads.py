"""`dflash-mlx pull`, `list` and `rm`: the models on this disk."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_mlx.errors import ModelNotFoundError
from dflash_mlx.loading.checks import WHETHER, fits, looks_quantized
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import (
    EMBEDDED,
    OTHERWISE,
    PACKAGES,
    check_name,
    gguf_file,
    known_drafter,
)

from . import options
from .pair import announce, announce_drafter, on_hub
from .screen import Figures, note, print_json, sized, stdout


def _copies_beginning(incomplete: str) -> list[str]:
    """The models on this disk that a shell may complete a name to."""
    return [name for name in Hub().copies() if name.startswith(incomplete)]


REPOSITORY = "A Hugging Face repository (owner/name)."
Name = Annotated[str, typer.Argument(help=REPOSITORY, autocompletion=options.targets_beginning)]
Downloaded = Annotated[str, typer.Argument(help=REPOSITORY, autocompletion=_copies_beginning)]
NoDrafter = Annotated[
    bool, options.flag("--no-draft", options.MODEL, "Leave the model's drafter where it is.")
]


def pull(*, name: Name, no_draft: NoDrafter = False, offline: options.Offline = False) -> None:
    """Download a model and the drafter that is known for it, and print where they are."""
    check_name(name)
    if "/" not in name:
        gguf_file(name)  # says how pip installs it
    if not on_hub(name):
        note(f"{name} is on this disk already.")
        return
    drafter, hub = known_drafter(name), Hub(offline=offline)
    announce(name, hub)
    names = [name]
    if drafter is None and not no_draft:
        note(f"No drafter is known for {name}: --draft NAME names one. {OTHERWISE}")
    elif drafter is not None and on_hub(drafter) and not no_draft:
        names.append(drafter)
        announce_drafter(drafter, hub)
    for one in names:
        print(f"{one}  {hub.fetch(one)}", flush=True)


def list_(*, json: options.Json = False) -> None:
    """List the models that are downloaded, with their sizes."""
    copies = Hub().copies()
    rows = [
        {"name": name, "bytes": size, "fits": fits(size, looks_quantized(name))}
        for name, size in copies.items()
    ]
    if json:
        print_json({"models": rows})
        return
    if not rows:
        note("Nothing is downloaded: dflash-mlx pull NAME does that, and 'tiny' needs no download.")
        return
    table = Figures("name", "size", WHETHER)
    for row in rows:
        table.add(str(row["name"]), sized(copies[str(row["name"])]), str(row["fits"]))
    stdout().print(table)


def rm(*, name: Downloaded) -> None:
    """Delete a downloaded model from this disk."""
    if name == EMBEDDED:
        raise ModelNotFoundError(f"{name} is part of this program, and nothing to delete.")
    if name in PACKAGES:
        package, _ = PACKAGES[name]
        raise ModelNotFoundError(f"{name} is a Python package: pip uninstall {package}")
    freed = Hub().remove(name)
    note(f"{name}: {sized(freed)} are free again.")
