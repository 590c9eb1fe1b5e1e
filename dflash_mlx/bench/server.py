"""Any OpenAI-compatible server, asked the same prompts and timed from outside.

One request at a time, streamed: what is measured is what one person would wait for (`clients` has
many at once). The server's own count of tokens is used; it alone knows its tokenizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..errors import ServerError
from ..events import FinishReason, Result, Stats
from .datasets import BenchPrompt
from .summary import SERVER, Measured

TIMEOUT = 600  # seconds without a byte: a long prompt on a slow machine may take minutes
END = "[DONE]"


@dataclass(frozen=True)
class Timed:
    """An answer, and the seconds between its pieces of text."""

    result: Result
    gaps: list[float]


@dataclass(frozen=True)
class Server:
    """A server and the model that it is asked for.

    Attributes:
        url: up to and with /v1, or what comes before it.
        model: the name it goes by there.
        key: that it asks for; None brings none.
    """

    url: str
    model: str
    key: str | None = None

    @classmethod
    def find(cls, url: str, model: str | None, key: str | None = None) -> Server:
        """A server at this address; without a model the first one that it offers.

        An address without a scheme, as localhost:8000, is http. Raises `ServerError`.
        """
        base = (url if "://" in url else f"http://{url}").rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        if model is not None:
            return cls(base, model, key)
        offered = cls(base, "", key).offered()
        if not offered:
            raise ServerError(f"{base}/models names no model: give --model.")
        return cls(base, offered[0], key)

    def offered(self) -> list[str]:
        """The models that it names; none where it does not say. Raises `ServerError`."""
        with _open(f"{self.url}/models", key=self.key) as response:
            try:
                return [str(one["id"]) for one in json.load(response)["data"]]
            except (ValueError, LookupError, TypeError, RecursionError):
                return []

    def ask(
        self, messages: Sequence[dict[str, str]], max_tokens: int, temperature: float, seed: int
    ) -> Result:
        """One streamed answer; as `timed`."""
        return self.timed(messages, max_tokens, temperature, seed).result

    def timed(
        self, messages: Sequence[dict[str, str]], max_tokens: int, temperature: float, seed: int
    ) -> Timed:
        """One streamed answer and its times; token ids are unknown.

        Decoding is timed from the first piece of text to the last one, and brings all tokens but
        the first, as our own does.

        Raises `ServerError`.
        """
        settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if temperature:  # at 0 it says nothing, and mlx-lm's server batches no request that has one
            settings["seed"] = seed
        stats, text, times = Stats(), [], []
        finish_reason: FinishReason = "length"
        start = time.perf_counter()
        for part in self.parts(messages, **settings):
            usage = part.get("usage") or {}
            stats.prompt_tokens = usage.get("prompt_tokens", stats.prompt_tokens)
            stats.output_tokens = usage.get("completion_tokens", stats.output_tokens)
            for choice in part.get("choices") or ():
                if piece := piece_of(choice.get("delta") or {}):
                    times.append(time.perf_counter())
                    text.append(piece)
                if choice.get("finish_reason") == "stop":
                    finish_reason = "stop"
        stats.output_tokens = stats.output_tokens or len(text)
        if times:
            stats.prefill_seconds = stats.first_token_seconds = times[0] - start
            stats.decode_seconds = times[-1] - times[0]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Timed(Result("".join(text), [], finish_reason, stats), gaps)

    def parts(
        self, messages: Sequence[dict[str, str]], **settings: Any
    ) -> Generator[dict[str, Any]]:
        """The objects of one streamed answer, the last of them with the usage.

        Whoever closes it has the server stop. Raises `ServerError`.
        """
        content = {"model": self.model, "messages": list(messages), "stream": True}
        content |= {"stream_options": {"include_usage": True}, **settings}
        with _open(f"{self.url}/chat/completions", content, self.key) as response:
            yield from _parts(response, self.url)


def measure_server(
    server: Server,
    prompts: Sequence[BenchPrompt],
    repeats: int,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[Measured]:
    """Ask every prompt `repeats` times, each conversation to its end, after one that warms up.

    Raises `ServerError`.
    """
    server.ask(prompts[0].messages, min(8, max_tokens), temperature, seed)
    for prompt in prompts:
        turn: BenchPrompt | None = prompt
        while turn is not None:
            asked = turn.messages
            runs = [server.ask(asked, max_tokens, temperature, seed) for _ in range(repeats)]
            yield Measured(turn, {SERVER: runs})
            turn = turn.answered(runs[0].text)


def _open(url: str, content: dict[str, Any] | None = None, key: str | None = None) -> HTTPResponse:
    """GET, or POST of JSON. Raises `ServerError`."""
    data = None if content is None else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = Request(url, data, headers)
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            told = _told(error.read(4000).decode(errors="replace"))
        raise ServerError(f"{url}: the server refuses ({error.code}): {told}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{url}: cannot be reached ({reason}).") from error
    return response


def _told(text: str) -> str:
    """What an error says: of one in OpenAI's form message and code, of others the beginning."""
    try:
        error = json.loads(text)["error"]
        text = f"{error['message']} ({error['code']})" if error.get("code") else error["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return " ".join(str(text)[:300].split())


def _parts(response: HTTPResponse, url: str) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Raises `ServerError` when it breaks off."""
    try:
        for line in response:
            name, _, value = line.decode().strip().partition(":")
            if name != "data":
                continue  # empty lines, comments, other events
            if value.strip() == END:
                return
            part = json.loads(value)
            if "error" in part:
                raise ServerError(f"{url}: the server gave up: {part['error']}")
            yield part
    except (OSError, HTTPException, ValueError, TypeError, RecursionError) as error:
        raise ServerError(f"{url}: the answer broke off or is no event stream.") from error
    raise ServerError(f"{url}: the answer broke off before its end.")


def piece_of(delta: dict[str, Any]) -> str:
    """The text of a part: the answer's, or the thinking's before it."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
