"""What the dialects of OpenAI share: usage, log-probabilities, and what drafting did."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..events import Stats
    from .answering import End, Step
    from .logprobs import Likely, TokenLogprob


def new_id(prefix: str) -> str:
    """An id that no other object has."""
    return f"{prefix}{secrets.token_hex(12)}"


def usage(prompt_tokens: int, ends: Sequence[End]) -> dict[str, Any]:
    """Tokens of a prompt and of all its answers."""
    output = sum(end.stats.output_tokens for end in ends)
    accepted = sum(end.stats.accepted_tokens for end in ends)
    drafted = sum(end.stats.drafted_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output,
        "total_tokens": prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": cached(ends)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def cached(ends: Iterable[End]) -> int:
    """Tokens of the prompt that none of the answers had to read."""
    return min((end.stats.reused_tokens for end in ends), default=0)


def drafting(ends: Sequence[End]) -> dict[str, Any]:
    """What no other server tells: rounds, tokens a round, and how many rounds had how many rows."""
    stats = [end.stats for end in ends]
    return {
        "rounds": sum(one.rounds for one in stats),
        "tokens_per_round": [round(one.acceptance_length, 3) for one in stats],
        "widths": _widths(stats),
        "prefill_seconds": round(sum(one.prefill_seconds for one in stats), 4),
        "decode_seconds": round(sum(one.decode_seconds for one in stats), 4),
    }


def _widths(stats: Sequence[Stats]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for one in stats:
        for rows, rounds in sorted(one.widths.items()):
            widths[str(rows)] = widths.get(str(rows), 0) + rounds
    return widths


def of_round(step: Step) -> dict[str, int]:
    """What one round did."""
    return {"tokens": step.tokens, "accepted": step.accepted, "drafted": step.drafted}


def logprob(one: TokenLogprob) -> dict[str, Any]:
    """A token of the answer and those that could have been."""
    return {**_likely(one.chosen), "top_logprobs": [_likely(other) for other in one.top]}


def _likely(one: Likely) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": one.bytes}
