"""The options that `serve` alone has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from . import options

SERVER = "Server"

Host = Annotated[
    str, options.value("--host", group=SERVER, metavar="HOST", help="The address to listen on.")
]
Port = Annotated[
    int,
    options.value(
        "--port", "-p", group=SERVER, metavar="PORT", help="0 takes a free one.", min=0, max=65535
    ),
]


@dataclass(frozen=True)
class Reached:
    """How a server is reached, and by whom."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    api_key: Annotated[
        list[str] | None,
        options.value(
            group=SERVER,
            metavar="KEY",
            help="Serve who brings this key. Repeatable.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        options.value(
            group=SERVER, metavar="FILE", help="Keys, one a line, which ps does not show."
        ),
    ] = None
    no_auth: Annotated[
        bool, options.flag("--no-auth", SERVER, "Serve other machines without a key.")
    ] = False
    allow_host: Annotated[
        list[str] | None,
        options.value(
            group=SERVER, metavar="NAME", help="Another name it is called by. Repeatable."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        options.value(
            group=SERVER,
            metavar="URL",
            help="Let pages of this origin ask. Repeatable.",
        ),
    ] = None


@dataclass(frozen=True)
class Load:
    """How much a server takes on."""

    concurrency: Annotated[
        int,
        options.value(
            group=SERVER, metavar="N", help="Answers that are made together.", min=1, max=1024
        ),
    ] = 32
    queue: Annotated[
        int,
        options.value(group=SERVER, metavar="N", help="Answers that may wait; then 429.", min=0),
    ] = 64
    memory: Annotated[
        float | None,
        options.value(
            group=SERVER,
            metavar="GB",
            help="For the caches of all answers. Default: no limit.",
            min=0.001,
        ),
    ] = None
    prefix_cache: Annotated[
        float,
        options.value(
            group=SERVER,
            metavar="GB",
            help="For what prompts share; 0 reads all anew.",
            min=0,
        ),
    ] = 4.0
    cache_dir: Annotated[
        Path | None,
        options.value(
            group=SERVER,
            metavar="DIR",
            help="Keep it on disk too, prompts and all.",
        ),
    ] = None
    drain_seconds: Annotated[
        float,
        options.value(
            group=SERVER,
            metavar="S",
            help="For answers to end after SIGTERM or Ctrl-C.",
            min=0,
        ),
    ] = 30.0


Verbose = Annotated[bool, options.flag("--verbose", SERVER, "Log a line for every request.")]
