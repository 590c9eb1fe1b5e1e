"""A server's application without a socket, over an engine that says what a test has it say."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from starlette.testclient import TestClient
from transformers import AutoTokenizer

import dflash_mlx
from dflash_mlx.events import Event, Stats
from dflash_mlx.serve.access import Access
from dflash_mlx.serve.app import Options, make_app
from dflash_mlx.serve.desk import Desk
from dflash_mlx.serve.front import make_waiting_app
from dflash_mlx.serve.metrics import Metrics
from dflash_mlx.serve.run import Limits, Server, listen

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def a_target(
    parser: Any = None, template: str = CHATML, thinking: str | None = None, context: int = 2**20
) -> Any:
    """What a server needs of a target: the embedded tokenizer, with a family's syntax of calls.

    Args:
        parser: a module of mlx_lm.tool_parsers.
        template: of chats.
        thinking: put behind the generation prompt.
    """
    folder = f"{dflash_mlx.__path__[0]}/tiny/target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if thinking is not None:
        tokenizer.add_tokens(["<think>", "</think>"])
        template += "{% if add_generation_prompt %}" + thinking + "{% endif %}"
    tokenizer.chat_template = template
    markers = {}
    if parser is not None:
        markers = {
            "tool_call_start": parser.tool_call_start,
            "tool_call_end": parser.tool_call_end,
            "tool_parser": parser.parse_tool_call,
        }
    wrapper = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, [2], **markers)
    return SimpleNamespace(
        tokenizer=wrapper, vocab_size=len(tokenizer), context_length=context, name="told"
    )


@dataclass
class SaidJob:
    """A job whose rounds are known: pieces of text, then an end or an error."""

    events: Iterable[Event]
    error: Exception | None = None
    cancelled: bool = False
    waits: bool = False  # for ever, after its events
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self):
        for event in self.events:
            await asyncio.sleep(0)
            if self.cancelled:
                return
            yield event
        if self.error is not None:
            raise self.error
        if self.waits and not self.cancelled:
            await self.leaving.wait()

    def cancel(self) -> None:
        self.cancelled = True
        self.leaving.set()


@dataclass
class Says:
    """An engine that answers every request with the same rounds.

    Attributes:
        rounds: their texts.
        reason: why the answer ends; None lets it wait for ever.
        error: raised in its place.
        asked: (prompt, settings) of every job.
    """

    target: Any
    rounds: Sequence[str] = ("Hello", " world")
    reason: str | None = "stop"
    error: Exception | None = None
    cached: int = 0
    progressed: float = 0.0
    busy: bool = False  # but for those who wait
    asked: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    jobs: list[SaidJob] = field(default_factory=list)

    def submit(self, prompt, **settings):
        self.asked.append((list(prompt), settings))
        stats = Stats(prompt_tokens=len(prompt), reused_tokens=self.cached)
        job = SaidJob(list(self._events(stats)), self.error, waits=self.reason is None)
        self.jobs.append(job)
        return job

    def _events(self, stats):
        last = len(self.rounds) - 1
        ends = sorted(self.target.tokenizer.eos_token_ids)
        for number, text in enumerate(self.rounds):
            tokens = self.target.tokenizer.encode(text, add_special_tokens=False)
            over = number == last and self.error is None and self.reason is not None
            tokens += ends[:1] if over and self.reason == "stop" else []
            stats.count_round(len(tokens), max(0, len(tokens) - 1), len(tokens))
            reason = self.reason if over else None
            yield Event(text, tokens, max(0, len(tokens) - 1), len(tokens), reason, stats)

    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.target.tokenizer.decode(self.asked[-1][0])


def a_desk(engine: Any, room: int = 64, defaults: Any = None) -> Desk:
    """Of a server with this engine."""
    return Desk(engine.target, engine, defaults or {}, room, Metrics())


def client(engine: Any, room: int = 64, **more: Any) -> TestClient:
    """Of the application, in this process."""
    access = more.pop("access", Access())
    desk = a_desk(engine, room, more.pop("defaults", {}))
    app = make_app(desk, Options("told", access, **more))
    return TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)


def frames(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of events, but for the comments and the last word."""
    lines = (line for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


LIMITS = Limits(head_seconds=60, drain_seconds=0.05)  # what is slow is no fault by itself


@asynccontextmanager
async def running(engine, limits=LIMITS, loaded=True, **options):
    """A server in this event loop, and its port; not `loaded` it still waits for its model."""
    desk = a_desk(engine)
    server = Server(make_waiting_app(Access(), desk.metrics), limits)
    if loaded:
        server.open(make_app(desk, Options("told", Access(), **options)), desk)
    bound = listen("127.0.0.1", 0)
    server.port, server.desk = bound.getsockname()[1], desk
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0)
    server.task = task
    try:
        yield server
    finally:
        server.handle_exit(2, None)
        server.handle_exit(2, None)
        await task
