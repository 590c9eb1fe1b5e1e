"""The samples of a run: prompts of a file or of the target's own, answered by the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ..errors import DataError, PromptError
from ..prompt import encode_prompt
from ..targets import Target
from .answers import Answering, AnswersProgress, answer_all
from .data import Sample, encode_chat, encode_text, read_records
from .recipe import Recipe
from .synthesize import write_turns


@dataclass(frozen=True)
class Written:
    """User turns that the target has written so far."""

    turns: int
    wanted: int


def gather(
    target: Target, work: Path, recipe: Recipe, listen: Callable[[Written | AnswersProgress], None]
) -> list[Sample]:
    """All samples, in their order."""
    samples: list[Sample] = []
    prompts: list[list[int]] = []
    if recipe.data is None:
        turns = write_turns(
            target,
            recipe.synthesize or 0,
            work / "turns.jsonl",
            Answering(recipe.turn_tokens, recipe.rows, 2 * recipe.rows),
            recipe.seed,
            lambda turns, wanted: listen(Written(turns, wanted)),
        )
        prompts = [encode_prompt(target, [{"role": "user", "content": t}]) for t in turns]
    else:
        for where, record in read_records(recipe.data):
            if isinstance(record, str):
                samples.append(_sample(where, encode_text(target.tokenizer, record)))
            elif recipe.keep_answers:
                samples.append(_sample(where, encode_chat(target.tokenizer, record)))
            else:
                prompts += _prompts(target, where, record)
    answering = Answering(recipe.max_tokens, recipe.rows, 4 * recipe.rows)
    answers = answer_all(target, prompts, work / "answers.jsonl", answering, listen)
    samples += [answer.sample for answer in answers if len(answer.answer) > 1]
    longest = target.context_length
    samples = list(dict.fromkeys(s for s in samples if len(s.tokens) <= longest))
    if len(samples) < 2:
        raise DataError("There are not two samples to learn from: give more data.")
    return samples


def _prompts(target: Target, where: str, record: Sequence[dict[str, str]]) -> list[list[int]]:
    """The token ids before each turn of the assistant, the last one opened if it is not there."""
    ends = [i for i, m in enumerate(record) if m["role"] == "assistant"]
    if record[-1]["role"] != "assistant":
        ends.append(len(record))
    try:
        return [encode_prompt(target, record[:end]) for end in ends]
    except PromptError as error:
        raise DataError(f"{where}: {error}") from error


def _sample(where: str, sample: Sample) -> Sample:
    if not any(end > start for start, end in sample.answers):
        raise DataError(f"{where}: nothing to learn from: no answer, or an empty text.")
    return sample


def split(samples: list[Sample], recipe: Recipe) -> tuple[list[Sample], list[Sample]]:
    """Held-out samples and the others, by the seed; at most a tenth is held out."""
    count = max(1, min(recipe.held_out, len(samples) // 10))
    chosen = {*Random(recipe.seed).sample(range(len(samples)), count)}
    apart = [sample for i, sample in enumerate(samples) if i in chosen]
    return apart, [sample for i, sample in enumerate(samples) if i not in chosen]
