"""A seeded synthetic chat corpus with a clean split into training and held-out problems.

No downloads: everything is generated from a seed. Whether a conversation is held out depends only
on a stable hash of the *problems* in it (`Turn.keys`), never on their phrasing, the seed or the
order of generation. Training drops every conversation that touches a held-out problem, held-out
prompts consist of held-out problems, so the two cannot overlap however long either stream is
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from dflash_mlx.errors import SettingsError

from . import passages, problems
from .problems import Turn

HELD_OUT_SHARE = 12  # one key in this many is held out
CATEGORIES = ("arithmetic", "counting", "units", "code", "story", "qa", "chat")
CHAT_SHARE = 0.13  # of the training conversations are chats of several turns
GREETING_SHARE = 0.02  # are a greeting or a farewell alone


@dataclass(frozen=True)
class Conversation:
    """One or more turns; `category` is that of the only turn, or "chat"."""

    category: str
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages, ending with the assistant's last answer."""
        messages = []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.prompt})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


def is_held_out_key(key: str) -> bool:
    """Whether the problem named by `key` is held out, by a hash that never changes."""
    digest = blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def in_training(turn: Turn) -> bool:
    """No problem of the turn is held out."""
    return not any(map(is_held_out_key, turn.keys))


def in_held_out(turn: Turn) -> bool:
    """The problem the prompt asks for, its first key, is held out."""
    return bool(turn.keys) and is_held_out_key(turn.keys[0])


def draw(rng: Random, held_out: bool) -> Turn:
    """A question from one side of the split: drawn again and again until one is."""
    generators = {**problems.GENERATORS, **passages.GENERATORS}
    wanted = in_held_out if held_out else in_training
    while True:
        [generator] = rng.choices([*generators], [*generators.values()])
        turn = generator(rng)
        if wanted(turn):
            return turn


def draw_chat(rng: Random, held_out: bool) -> Conversation:
    """One or two questions, some after a greeting (a single one always) or before thanks."""
    turns = [draw(rng, held_out) for _ in range(rng.choice((1, 2, 2)))]
    if len(turns) == 1 or rng.random() < 0.2:
        turns.insert(0, passages.greeting(rng))
    if rng.random() < 0.2:
        turns.append(passages.farewell(rng))
    return Conversation("chat", tuple(turns))


def conversations(seed: int) -> Iterator[Conversation]:
    """The endless training stream of a seed; it never touches a held-out problem."""
    rng = Random(seed)
    while True:
        kind = rng.random()
        if kind < CHAT_SHARE:
            yield draw_chat(rng, held_out=False)
        elif kind < CHAT_SHARE + GREETING_SHARE:
            turn = rng.choice((passages.greeting, passages.farewell))(rng)
            yield Conversation("chat", (turn,))
        else:
            turn = draw(rng, held_out=False)
            yield Conversation(turn.category, (turn,))


def held_out(per_category: int, seed: int = 0) -> list[Conversation]:
    """`per_category` held-out conversations of every category, without repeated prompts.

    Raises `SettingsError` where a category has not so many (the smallest, qa, has about 45).
    """
    rng = Random(seed)
    chosen: dict[str, dict[str, Conversation]] = {category: {} for category in CATEGORIES}
    for _ in range(100 * per_category):
        turn = draw(rng, held_out=True)
        chat = draw_chat(rng, held_out=True)
        for conversation in (Conversation(turn.category, (turn,)), chat):
            by_prompt = chosen[conversation.category]
            if len(by_prompt) < per_category:
                prompt = "\n".join(turn.prompt for turn in conversation.turns)
                by_prompt.setdefault(prompt, conversation)
        if all(len(by_prompt) == per_category for by_prompt in chosen.values()):
            return [c for category in CATEGORIES for c in chosen[category].values()]
    raise SettingsError(f"There are not {per_category} held-out prompts in every category.")
