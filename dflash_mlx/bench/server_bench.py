"""Ask an OpenAI-compatible server the same prompts and time it from outside.

Requests are streamed, one at a time or from several clients at once. Token counts are the server's
own, because only it knows its tokenizer.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from ipaddress import ip_address
from itertools import cycle, islice, pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

from ..errors import ServerError
from ..events import FinishReason, Result, Stats
from .datasets import BenchPrompt
from .results import SERVER, PromptRuns, ask_all

TIMEOUT = 600  # seconds without a byte: a long prompt on a slow machine takes minutes
END = "[DONE]"
LEAST_SECONDS = 0.05  # from the first piece to the last; pieces of a single read come faster
REQUESTS_PER_CLIENT = 2  # at least
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ServerClient:
    """Sends requests to one server and model.

    Attributes:
        url: the server's address, ending in /v1.
        model: the model's name on the server.
        key: the API key; None sends none.
    """

    url: str
    model: str
    key: str | None = None

    @classmethod
    def find(cls, url: str, model: str | None, key: str | None = None) -> ServerClient:
        """A client for the server at this address; `model` None takes the first that it lists.

        An address without a scheme, like localhost:8000, is http. Raises `ServerError`.
        """
        base = (url if "://" in url else f"http://{url}").rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        if model is not None:
            return cls(base, model, key)
        with _open(f"{base}/models", key=key) as response:
            try:
                return cls(base, str(json.load(response)["data"][0]["id"]), key)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise ServerError(f"{base}/models lists no model: give --model.") from error

    def ask(
        self, messages: Sequence[dict[str, str]], max_tokens: int, temperature: float, seed: int
    ) -> tuple[Result, list[float]]:
        """Stream one answer: the result without token ids, and the seconds between its pieces.

        Decoding time counts all tokens but the first, like our own loop. Raises `ServerError`.
        """
        settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if temperature:  # mlx-lm's server does not batch requests that have a seed
            settings["seed"] = seed
        stats = Stats()
        text = []
        times = []
        finish_reason: FinishReason = "length"
        for reasoning, content, reason in self.stream(messages, stats, **settings):
            if reasoning or content:
                times.append(time.perf_counter())
                text.append(reasoning + content)
            if reason == "stop":
                finish_reason = "stop"
        stats.output_tokens = stats.output_tokens or len(text)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Result("".join(text), tokens=[], finish_reason=finish_reason, stats=stats), gaps

    def stream(
        self, messages: Sequence[dict[str, str]], stats: Stats, **settings: Any
    ) -> Generator[tuple[str, str, str | None]]:
        """Stream one answer: reasoning, text and finish reason of each piece, counted in `stats`.

        Decoding time runs from the first piece to the last; below `LEAST_SECONDS` it is 0, not
        measured. Closing the generator ends the request. Raises `ServerError`.
        """
        start = time.perf_counter()
        first = 0.0
        with closing(self.chunks(messages, **settings)) as chunks:
            for chunk in chunks:
                usage = chunk.get("usage") or {}
                details = usage.get("prompt_tokens_details") or {}
                stats.prompt_tokens = usage.get("prompt_tokens", stats.prompt_tokens)
                stats.output_tokens = usage.get("completion_tokens", stats.output_tokens)
                stats.reused_tokens = details.get("cached_tokens") or stats.reused_tokens
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    now = time.perf_counter()
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    content = delta.get("content") or ""
                    if reasoning or content:
                        first = first or now
                        stats.prefill_seconds = first - start
                        stats.first_token_seconds = stats.prefill_seconds
                        took = now - first
                        stats.decode_seconds = took if took >= LEAST_SECONDS else 0.0
                    yield reasoning, content, choice.get("finish_reason")

    def chunks(
        self, messages: Sequence[dict[str, str]], **settings: Any
    ) -> Generator[dict[str, Any]]:
        """The JSON chunks of one streamed answer; the last one has the usage.

        Closing the generator ends the request. Raises `ServerError`.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True}
        body |= {"stream_options": {"include_usage": True}, **settings}
        with _open(f"{self.url}/chat/completions", body, self.key) as response:
            yield from _read_events(response, self.url)


def measure_server(
    client: ServerClient,
    prompts: Sequence[BenchPrompt],
    repeats: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    ran: Callable[[], object] = lambda: None,
) -> Iterator[PromptRuns]:
    """Ask every prompt `repeats` times, each conversation to its end, after one warm-up request.

    Calls `ran` after each. Raises `ServerError`.
    """

    def answer(prompt: BenchPrompt, length: int = max_tokens) -> Result:
        result, _ = client.ask(
            prompt.messages, max_tokens=length, temperature=temperature, seed=seed
        )
        ran()
        return result

    def ask(prompt: BenchPrompt) -> PromptRuns:
        return PromptRuns(prompt, {SERVER: [answer(prompt) for _ in range(repeats)]})

    answer(prompts[0], min(WARM_UP_TOKENS, max_tokens))
    yield from ask_all(prompts, ask)


def measure_concurrency(
    client: ServerClient,
    prompts: Sequence[BenchPrompt],
    clients: int,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Ask with several clients at once; each sends its next request when it has its answer.

    Only the first turn of a conversation is asked. Returns tokens per second over all answers, and
    percentiles of the seconds to the first text and between pieces of text. Raises `ServerError`.
    """
    count = max(len(prompts), REQUESTS_PER_CLIENT * clients)
    conversations = [prompt.messages for prompt in islice(cycle(prompts), count)]
    ask = partial(client.ask, max_tokens=max_tokens, temperature=temperature, seed=seed)
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(ask, conversations))
    seconds = time.perf_counter() - start
    stats = [result.stats for result, _ in answers]
    tokens = sum(answer.output_tokens for answer in stats)
    waits = [answer.first_token_seconds for answer in stats if answer.first_token_seconds]
    return {
        "clients": clients,
        "requests": len(answers),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_seconds": percentiles(waits),
        "gap_seconds": percentiles([gap for _, gaps in answers for gap in gaps]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile; empty if there are no values."""
    if not values:
        return {}
    median, p95 = np.quantile(values, (0.5, 0.95)).round(4).tolist()
    return {"median": median, "p95": p95}


def open_url(request: Request, timeout: float) -> HTTPResponse:
    """Send a request, to this machine without a proxy. Raises as `urllib.request.urlopen`."""
    direct = _is_here(urlsplit(request.full_url).hostname or "")
    opener = build_opener(ProxyHandler({})) if direct else build_opener()
    response: HTTPResponse = opener.open(request, timeout=timeout)
    return response


def _is_here(host: str) -> bool:
    """Whether a host name or address is this machine. Nothing is looked up in the network.

    An address belongs to this machine if a socket can be bound to it.
    """
    try:
        family = socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except ValueError:
        host_name = socket.gethostname().lower().removesuffix(".local")
        return (
            host == "localhost"
            or host.endswith(".localhost")
            or host in (host_name, f"{host_name}.local")
        )
    except OSError:
        return False
    return True


def _open(url: str, body: dict[str, Any] | None = None, key: str | None = None) -> HTTPResponse:
    """GET, or POST of JSON. Raises `ServerError`."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        return open_url(Request(url, data, headers), TIMEOUT)
    except HTTPError as error:
        with error:
            message = _error_message(error.read(4000).decode(errors="replace"))
        raise ServerError(f"{url}: the server refuses ({error.code}): {message}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{url}: cannot be reached ({reason}).") from error


def _error_message(text: str) -> str:
    """Message and code of an error in OpenAI's form; the beginning of any other text."""
    try:
        error = json.loads(text)["error"]
        text = f"{error['message']} ({error['code']})" if error.get("code") else error["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return " ".join(str(text)[:300].split())


def _read_events(response: HTTPResponse, url: str) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Raises `ServerError` when it breaks off."""
    try:
        for line in response:
            name, _, value = line.decode().strip().partition(":")
            if name != "data":
                continue  # empty lines, comments, other events
            if value.strip() == END:
                return
            chunk = json.loads(value)
            if "error" in chunk:
                raise ServerError(f"{url}: the server gave up: {chunk['error']}")
            yield chunk
    except (OSError, HTTPException, ValueError, TypeError, RecursionError) as error:
        raise ServerError(f"{url}: the answer broke off or is no event stream.") from error
    raise ServerError(f"{url}: the answer broke off before its end.")
