"""What the target itself says, for a drafter to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from dflash_mlx.prompt import encode_prompt
from dflash_mlx.targets import Target
from dflash_mlx.train.answer_writer import Answer, AnswerSettings, Ids, Sampler, answer_all
from dflash_mlx.train.dataset import Sample

from . import corpus, strangers
from .progress import Counted

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

EPOCH = 4096  # conversations of the corpus that are made, tokenized and sorted at once
DRAFTER_SEED = 500_000  # of the corpus that drafters learn
SUITE_SIZE = 16  # held-out prompts per category in prompts.jsonl
SCORED = 40  # held-out prompts per category behind the model card's scores

OWN_SEED = 700_000
OWN_REQUESTS = 16_000  # of strangers, no two the same
OWN_TOKENS = 160  # of an answer
BEGUN_TOKENS = 32  # most tokens drawn at random at the beginning of an answer


def different_requests() -> list[str]:
    """Different requests of strangers: OWN_REQUESTS to learn from, then SCORED to be scored by.

    Two that differ only in capitals or in the punctuation at their ends are the same.
    """
    different: dict[str, str] = {}
    stream = strangers.requests(OWN_SEED)
    while len(different) < OWN_REQUESTS + SCORED:
        text = next(stream)
        different.setdefault(strangers.bare(text), text)
    return [*different.values()]


def own_answers(target: Target, work: Path) -> list[Sample]:
    """The target's answers to strangers: greedy ones, and greedy ends of random beginnings.

    The target greedily gives most strangers one of a few answers, which a drafter learns by heart.
    After a beginning of up to BEGUN_TOKENS tokens drawn at random it gives many more, so each
    request is answered once in each way. Answers that drafters are scored by are left out. Files in
    the folder `work` keep the answers.
    """
    prompts = [
        encode_prompt(target, [{"role": "user", "content": text}])
        for text in different_requests()[:OWN_REQUESTS]
    ]
    greedily = AnswerSettings(OWN_TOKENS, rows=48)
    greedy = answers_to(target, prompts, work / "answers.jsonl", greedily)
    short = AnswerSettings(BEGUN_TOKENS, rows=48)
    begun = [*cut(answers_to(target, prompts, work / "beginnings.jsonl", short, drawn))]
    unfinished = [answer.prompt + answer.answer for answer in begun]
    ends = answers_to(target, unfinished, work / "begun.jsonl", greedily)
    whole = [
        Answer(answer.prompt, answer.answer + end.answer, end.ended)
        for answer, end in zip(begun, ends, strict=True)
    ]
    samples = learnable([*greedy, *whole], target.tokenizer)
    Random(OWN_SEED).shuffle(samples)
    return samples


def answers_to(
    target: Target,
    prompts: Sequence[Ids],
    path: Path,
    answering: AnswerSettings,
    sampler_at: Callable[[int], Sampler | None] = lambda start: None,
) -> list[Answer]:
    """The target's answers, kept in the file `path`. Prints a line every 10 chunks.

    `sampler_at` returns the sampler of the chunk that begins at a prompt's number; None is greedy.
    """
    counted = Counted(path.stem, 10 * answering.chunk)
    return answer_all(target, prompts, path, answering, counted, sampler_at)


def drawn(start: int) -> Sampler:
    """The sampler, at temperature 1, of the chunk of answers that begins at a prompt's number."""
    mx.random.seed(OWN_SEED + start)
    return make_sampler(1.0)


def cut(answers: Iterable[Answer]) -> Iterator[Answer]:
    """A beginning of each answer, of a length drawn at random; none holds the end of its answer."""
    rng = Random(OWN_SEED)
    for answer in answers:
        length = min(rng.randint(1, BEGUN_TOKENS), len(answer.answer) - answer.ended)
        if length:
            yield Answer(answer.prompt, answer.answer[:length], False)


def learnable(answers: Iterable[Answer], tokenizer: TokenizerWrapper) -> list[Sample]:
    """The answers to learn from: those that are not empty, nor the answer to a held-out problem.

    Held-out answers that training has to other problems anyway are learnt.
    """
    scored = [*corpus.held_out(SUITE_SIZE), *corpus.held_out(SCORED, seed=1)]
    trained = islice(corpus.conversations(DRAFTER_SEED), EPOCH)
    secret = answers_of(scored) - answers_of(trained)
    texts = (
        (answer, tokenizer.decode(answer.answer, skip_special_tokens=True)) for answer in answers
    )
    return [
        answer.sample for answer, text in texts if len(answer.answer) > 1 and text not in secret
    ]


def answers_of(conversations: Iterable[corpus.Conversation]) -> set[str]:
    """The different answers in some conversations."""
    return {turn.answer for conversation in conversations for turn in conversation.turns}
