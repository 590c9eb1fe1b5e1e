"""`dflash-mlx serve`: a model for clients of OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import typer

import dflash_mlx
from dflash_mlx.cluster.supervisor_line import READY
from dflash_mlx.errors import DFlashError, MissingDependencyError, OutputError, SettingsError
from dflash_mlx.machine.signals import signals_to

from . import options
from .machines import Machines, inherited, joined, shared
from .output import error_line, note
from .pair import Pair, measuring, open_pair
from .serve_options import Load, Reached, Verbose

if TYPE_CHECKING:
    from dflash_mlx import Engine, PrefixStore, Target
    from dflash_mlx.serve.auth import Auth
    from dflash_mlx.serve.handler import RequestHandler
    from dflash_mlx.serve.metrics import Metrics
    from dflash_mlx.serve.server import APIServer

STUCK_SECONDS: Final = 30.0  # a chunk of a long prompt may take a large model as long
STUCK_CODE: Final = 1
LEAST_GB, MOST = 0.001, 1e6  # gigabytes or seconds; more is a mistake, and infinite no number
LAST_SECONDS: Final = 2.0  # for clients to hear what is wrong


def serve(
    context: typer.Context,
    *,
    names: options.Names,
    no_draft: options.NoDraft = False,
    weights: options.Weights,
    reached: Reached,
    load: Load,
    max_tokens: options.MaxTokens = 4096,
    sampling: options.Sampling,
    rounds: options.Rounds,
    machines: Machines,
    verbose: Verbose = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's dialects, and a page to chat on.

    Settings of decoding are for requests that do not bring their own.
    """
    try:
        from dflash_mlx.serve.auth import Auth
        from dflash_mlx.serve.server import listen
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(f"{error.name} is not installed", "serve") from error
    _check_load(load)
    keys = _keys(reached)
    if keys and reached.no_auth:
        raise typer.BadParameter("goes without a key", param_hint="--no-auth")
    auth = Auth(
        reached.host,
        keys,
        frozenset(name.lower() for name in reached.allow_host or ()),
        frozenset(origin.lower().rstrip("/") for origin in reached.allow_origin or ()),
        reached.no_auth,
    )
    listening = partial(listen, reached.host, reached.port)
    if shared(machines, names, weights, context, listening):
        return
    _log(verbose)
    with (
        inherited(context) or listening() as socket,  # a taken port is told before all else
        _serving(socket, auth, load) as (server, metrics, over),
    ):
        check = partial(_check_sampling, sampling)
        pair = open_pair(names, weights, rounds, no_draft, member=joined(context), check=check)
        settings = vars(sampling) | {"max_tokens": max_tokens, "kv_bits": pair.kv_bits}
        if pair.policy is None:
            settings |= {"block_size": pair.block_size, "tree_budget": pair.tree_budget}
        engine = _open(server, pair, names.model, auth, load, settings, metrics)
        host, port = socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"{pair.title}: http://{shown}:{port}  (also /v1, /health, /metrics; Ctrl-C ends it)")
        with signals_to(partial(_end, server, over, load.drain_seconds)):
            over.result()
            _close(engine)
        if pair.chains is not None:
            pair.chains.keep()


def _check_sampling(sampling: options.Sampling, target: Target) -> None:
    """Raise `SettingsError` for settings that no request could be answered with."""
    from dflash_mlx.settings import SamplingSettings

    SamplingSettings(**vars(sampling)).check_vocabulary(target.vocab_size)


def _check_load(load: Load) -> None:
    """Refuse numbers that no machine has, before they are counted in bytes."""
    for name in ("memory", "prefix_cache", "drain_seconds"):
        number = getattr(load, name)
        least = LEAST_GB if name == "prefix_cache" and number else 0
        if number is not None and not least <= number <= MOST:
            said = f"must be from {least:g} to {MOST:g}, not {number:g}"
            raise typer.BadParameter(said, param_hint=options.spelled(name))
    if load.cache_dir is not None and not load.prefix_cache:
        raise typer.BadParameter("goes without --prefix-cache 0", param_hint="--cache-dir")


def _close(engine: Engine) -> None:
    """End the engine; the process, where a call of the device never returns."""
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(STUCK_SECONDS)
    if closing.is_alive():
        error_line("The engine does not come back from the device: the process ends without it.")
        sys.stderr.flush()
        os._exit(STUCK_CODE)


@contextmanager
def _serving(
    socket: Any, auth: Auth, load: Load
) -> Iterator[tuple[APIServer, Metrics, Future[None]]]:
    """A server in a thread of its own, which says that the model loads until there is one.

    So loading stays in the main thread, where Ctrl-C ends it.
    """
    from dflash_mlx.serve.metrics import Metrics
    from dflash_mlx.serve.server import APIServer, make_loading_app

    metrics = Metrics()
    server = APIServer(make_loading_app(auth, metrics), load.drain_seconds)
    with ThreadPoolExecutor(1, "dflash-http") as threads:
        over = threads.submit(server.run, sockets=[socket])
        try:
            yield server, metrics, over
        finally:
            if not over.done():  # loading failed, or was interrupted
                server.stop()


def _open(
    server: APIServer,
    pair: Pair,
    name: str,
    auth: Auth,
    load: Load,
    settings: dict[str, Any],
    metrics: Metrics,
) -> Engine:
    """Have the model answer; what makes its answers."""
    from dflash_mlx.serve.app import make_app
    from dflash_mlx.serve.handler import RequestHandler

    engine = dflash_mlx.Engine(
        pair.target,
        pair.drafter,
        policy=pair.policy,
        prefix=_prefix(pair, load),
        memory=None if load.memory is None else int(load.memory * 1e9),
        most_jobs=load.concurrency,
        meanwhile=measuring,
    )
    handler = RequestHandler(pair.target, engine, settings, load.concurrency + load.queue, metrics)
    server.set_app(make_app(handler, name, auth), handler)
    if pair.member is not None:
        pair.member.end = partial(_give_up, engine, handler, server)
        pair.member.tell(READY)
    return engine


def _give_up(
    engine: Engine, handler: RequestHandler, server: APIServer, error: DFlashError
) -> None:
    """The machines have lost each other: clients are told, and then the process ends."""
    handler.draining = handler.lost = True
    engine.abandon(error)
    last = threading.Timer(LAST_SECONDS, server.stop)
    last.daemon = True
    last.start()


def _end(
    server: APIServer, over: Future[None], seconds: float, number: int, frame: FrameType | None
) -> None:
    """SIGTERM and SIGINT end the server, not the process: that has an exit code of its own."""
    if over.done():  # nobody is answered any more, and the engine is not waited for
        os._exit(0)
    if server.busy:
        note(f"Finishing what is being answered, {seconds:g} s at most; again to end at once.")
    server.stop()


def _prefix(pair: Pair, load: Load) -> PrefixStore | None:
    """What prompts share."""
    if not load.prefix_cache:
        return None
    folder = None if load.cache_dir is None else load.cache_dir.expanduser()
    memory = int(load.prefix_cache * 1e9)
    store: type[PrefixStore] = dflash_mlx.PrefixStore
    if pair.member is not None:
        from dflash_mlx.cluster.target import LeaderPrefixCache as store
    return store(pair.target, pair.drafter, memory=memory, folder=folder)


def _log(verbose: bool) -> None:
    """A line for each request on stderr, and nothing of what it says."""
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("dflash_mlx.serve")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def _keys(reached: Reached) -> frozenset[str]:
    """The keys that were given. Raises `SettingsError` for an empty file or one that is none."""
    keys = set(reached.api_key or ())
    if reached.api_key_file is not None:
        keys |= _keys_in(reached.api_key_file.expanduser())
    if "" in keys:
        raise SettingsError("--api-key is empty: give a key.")
    return frozenset(keys)


def _keys_in(path: Path) -> set[str]:
    try:
        keys = {line.strip() for line in path.read_text().splitlines() if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path}: the keys cannot be read ({error}).") from error
    if not keys:
        raise SettingsError(f"{path} has no key in it.")
    return keys
