"""The options of `dflash-mlx serve`: how clients reach the server, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .options import flag, option

SERVER = "Server"  # a panel of --help
PORT = option(
    8000,
    "--port",
    "-p",
    panel=SERVER,
    metavar="PORT",
    help="Port to listen on; 0 picks a free one.",
    min=0,
    max=65535,
)


@dataclass(frozen=True)
class Access:
    """How clients reach the server, and which ones it answers."""

    host: str = option(
        "127.0.0.1",
        panel=SERVER,
        metavar="HOST",
        help="Address to listen on.",
    )
    port: int = PORT
    api_key: list[str] | None = option(
        None,
        panel=SERVER,
        metavar="KEY",
        help="Require this key. Repeatable.",
    )
    api_key_file: Path | None = option(
        None,
        panel=SERVER,
        metavar="FILE",
        help="Require one of the keys in FILE (one per line; # comments).",
    )
    no_auth: bool = flag("--no-auth", panel=SERVER, help="Answer other machines without a key.")
    allow_host: list[str] | None = option(
        None,
        panel=SERVER,
        metavar="NAME",
        help="Also accept requests to this host name. Repeatable.",
    )
    allow_origin: list[str] | None = option(
        None,
        panel=SERVER,
        metavar="URL",
        help="Let web pages of this origin send requests. Repeatable.",
    )


@dataclass(frozen=True)
class Load:
    """Limits of the server: requests, memory, disk and time."""

    concurrency: int = option(
        32,
        panel=SERVER,
        metavar="N",
        help="How many requests are decoded together.",
        min=1,
        max=1024,
    )
    queue: int = option(
        64,
        panel=SERVER,
        metavar="N",
        help="How many requests may wait.",
        min=0,
    )
    memory: float | None = option(
        None,
        panel=SERVER,
        metavar="GB",
        help="Memory for KV caches. Default: 80% of what the weights leave.",
        min=0.001,
    )
    wire: bool = flag(
        "--wire",
        panel=SERVER,
        help="Pin the last loaded weights in memory (macOS).",
    )
    prefix_cache: float | None = option(
        None,
        panel=SERVER,
        metavar="GB",
        help="Memory for prefixes. Default: 25% of what the weights leave.",
        min=0,
    )
    cache_dir: Path | None = option(
        None,
        panel=SERVER,
        metavar="DIR",
        help="Also keep shared prefixes on disk.",
    )
    cache_disk: float = option(
        32.0,
        panel=SERVER,
        metavar="GB",
        help="Size limit of --cache-dir.",
        min=0.001,
    )
    disk_left: float = option(
        10.0,
        panel=SERVER,
        metavar="GB",
        help="Disk space that --cache-dir leaves free.",
        min=0,
    )
    idle: float | None = option(
        None,
        panel=SERVER,
        metavar="MIN",
        help="Unload a model after MIN minutes without requests. Default: never.",
        min=0,
    )
    drain_seconds: float = option(
        30.0,
        panel=SERVER,
        metavar="S",
        help="Seconds to wait at shutdown for responses still being generated.",
        min=0,
    )
