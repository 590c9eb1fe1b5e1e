"""A conversation of `dflash-mlx chat`: the messages, their answers, and how fast those came."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dflash_mlx
from dflash_mlx.errors import DataError, OutputError, SettingsError
from dflash_mlx.validation import read_json

from .output import note, write_file
from .pair import Pair

if TYPE_CHECKING:
    from dflash_mlx import Event, Stats

Messages = list[dict[str, str]]
ROLES = ("system", "user", "assistant")
PLAIN_TEXTS, PLAIN_TOKENS = 2, 12  # of a measurement of plain decoding
COMPARED, COMPARE_SECONDS = 3, 2.0  # runs of /compare, while they take no longer


@dataclass
class Answer:
    """What one turn generated.

    Attributes:
        prompt: token ids that were answered.
        events: of its prefill and its rounds, as far as the answer came.
        settings: it was chosen by, of `stream_generate`.
        stopped: whether the person ended it.
    """

    prompt: list[int]
    events: list[Event] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(event.text for event in self.events)

    @property
    def tokens(self) -> list[int]:
        """Token ids."""
        return [token for event in self.events for token in event.tokens]

    @property
    def stats(self) -> Stats | None:
        """The request's counters; None when nothing was generated."""
        return self.events[-1].stats if self.events else None


class Dialogue:
    """Messages and answers, with the caches that go from turn to turn.

    Args:
        pair: what answers.
        settings: of `stream_generate`, the same for every turn.
    """

    def __init__(self, pair: Pair, settings: dict[str, Any]) -> None:
        self.pair, self.settings = pair, settings
        self._begin_empty()
        self._kept = dflash_mlx.Conversation(pair.target, pair.drafter, pair.kv_bits)

    def _begin_empty(self) -> None:
        """Nothing is said yet."""
        self.messages: Messages = []
        self.answers: list[Answer] = []  # of this session, undone ones too
        self.last: Answer | None = None  # the answer that the messages end with
        self._before: tuple[Messages, Messages] = [], []  # a load, and what was loaded
        self._unasked: tuple[Messages, Answer | None] = [], None  # before the last turn began

    @property
    def name(self) -> str:
        """The model's."""
        return self.pair.target.name

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are to choose from; None where that is not known."""
        return self.pair.target.vocab_size

    def thinking(self, answer: Answer) -> tuple[tuple[str, str] | None, bool]:
        """What is around reasoning, if the model has any, and whether an answer begins in it."""
        tokenizer = self.pair.target.tokenizer
        if not getattr(tokenizer, "has_thinking", False):
            return None, False
        tags = tokenizer.think_start, tokenizer.think_end
        return tags, tokenizer.decode(answer.prompt[-8:]).rstrip().endswith(tags[0])

    def ask(self, text: str) -> Answer:
        """Begin a turn. Raises `PromptError` where it does not fit; then all is as it was."""
        return self._begin([*self.messages, {"role": "user", "content": text}])

    @property
    def was_asked(self) -> bool:
        """Whether there is a question."""
        return any(message["role"] == "user" for message in self.messages)

    def retry(self) -> Answer:
        """Begin the last turn anew, with another seed where there is one. Raises as `ask` does."""
        is_answered = self.messages[-1]["role"] == "assistant"
        answer = self._begin(self.messages[:-1] if is_answered else [*self.messages])
        if self.settings["seed"] is not None:
            self.settings["seed"] = (self.settings["seed"] + 1) % 2**32
        return answer

    def _begin(self, messages: Messages) -> Answer:
        """The answer to these messages begins; until it is there, `take_back` forgets it."""
        answer = Answer(self._encoded(messages))
        self._unasked, self.messages = (self.messages, self.last), messages
        return answer

    def take_back(self) -> None:
        """Forget the turn that began last: the messages are those before it."""
        self.messages, self.last = self._unasked

    def _encoded(self, messages: Messages) -> list[int]:
        """Messages as token ids. Raises `PromptError` for more than the target reads."""
        from dflash_mlx.prompt import encode_prompt

        return encode_prompt(self.pair.target, messages)

    def stream(self, answer: Answer) -> Generator[Event]:
        """Generate a turn's answer, event by event; it is remembered as far as it came."""
        self.answers.append(answer)
        self.last = answer
        answer.settings, pair = dict(self.settings), self.pair
        try:
            for event in dflash_mlx.stream_generate(
                pair.target, pair.drafter, answer.prompt, conversation=self._kept, **answer.settings
            ):
                answer.events.append(event)
                yield event
        finally:
            self.messages.append({"role": "assistant", "content": answer.text})

    def held(self, answer: Answer) -> int:
        """At least so many tokens of an answer's prompt need not be read again."""
        return min(len(self._kept.ids), len(answer.prompt))

    def compare(self, answer: Answer) -> dflash_mlx.Result:
        """The same answer by plain decoding, to the same length: the quickest of a few runs.

        It is made at another moment than the answer was, when the machine may be slower.

        Raises `SettingsError` where that is what it was.
        """
        if self.pair.drafter is None:
            raise SettingsError("Nothing drafts in this chat.")
        settings = answer.settings | {"block_size": None, "policy": None, "tree_budget": None}
        settings["max_tokens"] = len(answer.tokens)
        start, runs = time.perf_counter(), list[dflash_mlx.Result]()
        while not runs or (len(runs) < COMPARED and time.perf_counter() - start < COMPARE_SECONDS):
            runs.append(dflash_mlx.generate(self.pair.target, None, answer.prompt, **settings))
        return max(runs, key=lambda run: run.stats.tokens_per_second)

    def undo(self) -> bool:
        """Forget the last question and its answer; whether there was one."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            return False
        self.messages.pop()
        self.last = None
        return True

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.last = None
        self.messages = [message for message in self.messages if message["role"] == "system"]

    @property
    def system(self) -> str:
        """The system message; empty without one."""
        return next((m["content"] for m in self.messages if m["role"] == "system"), "")

    def set_system(self, text: str) -> None:
        """Set the system message, or remove it with an empty text."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    compares = True  # with plain decoding, where something drafts

    def save(self, path: Path) -> None:
        """Write the messages as JSON, all or nothing.

        Raises `OutputError`, and does so where the file is something else than a conversation.
        """
        if path.is_file():
            try:
                read_talk(path)
            except DataError as error:
                raise OutputError(
                    f"{path} is there and is no saved conversation: give another name."
                ) from error
        content = {"model": self.name, "messages": self.messages}
        write_file(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote. Raises `DataError` and leaves all as it was."""
        messages, model = read_talk(path)
        self._before = self.messages, messages
        self.go_on([*messages], model)

    def unload(self) -> bool:
        """Go back to what was there before `load`, unless more was said since; whether it did."""
        before, loaded = self._before
        if not before or self.messages != loaded:
            return False
        self.messages, self.last, self._before = before, None, ([], [])
        return True

    def go_on(self, messages: Messages, model: str | None) -> None:
        """Go on from messages of a conversation with a model, which may have been another one."""
        self.messages, self.last = messages, None
        if model not in (None, self.name):
            note(f"That conversation was with {model}; {self.name} goes on with it.")


def read_talk(path: Path) -> tuple[Messages, str | None]:
    """The messages of a file that `Dialogue.save` wrote, and whose answers are in them.

    Raises `DataError`.
    """
    talk = read_json(path, DataError)
    messages, model = talk.get("messages"), talk.get("model")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise DataError(f"{path}: not a saved conversation (it lists no messages).")
    return messages, model if isinstance(model, str) else None


def measure_plain(pair: Pair) -> float | None:
    """Tokens per second of plain decoding, the best of a few short texts; None if all are empty."""
    texts = [[first] * 8 for first in range(PLAIN_TEXTS)]
    runs = [dflash_mlx.generate(pair.target, None, text, max_tokens=PLAIN_TOKENS) for text in texts]
    return max((run.stats.tokens_per_second for run in runs), default=None) or None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and message["role"] in ROLES
        and isinstance(message["content"], str)
    )
