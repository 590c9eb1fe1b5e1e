"""From a target to a drafter on disk: prompts, answers, features, training; each step kept.

Everything that is made lies in OUT/work until the drafter is whole, so the same call goes on where
an interrupted one stopped, whatever stopped it, and ends with bitwise the same drafter: each step
depends on what earlier ones wrote and on the seed, never on the clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..drafter.config import DraftConfig
from ..drafter.network import DFlash
from ..errors import OutputError
from ..targets import Target
from .answers import AnswersProgress
from .batches import bucket_length
from .data import Sample
from .drafter import (
    DrafterSettings,
    check_trainable,
    new_drafter,
    save_drafter,
    start_own_head,
    train_drafter,
)
from .fit import Report
from .gather import Written, gather, split
from .plan import Estimate, check, estimate
from .recipe import EPOCHS, TARGET, Recipe, claim, sole_use
from .shape import draft_shape, mask_token
from .slots import frequent
from .store import Store, build_store
from .synthesize import user_header
from .warm import start_from_target

TIMED_STEPS = 4  # behind the number of steps that fit into some hours
STEPS_SHARE = 0.5  # of the hours belongs to steps, however long prompts and answers took


@dataclass(frozen=True)
class Read:
    """Samples whose features are on disk."""

    samples: int
    all: int
    bytes: int


@dataclass(frozen=True)
class Begun:
    """What training is about to do."""

    samples: int
    held_out: int
    tokens: int
    answer_tokens: int
    steps: int
    estimate: Estimate
    tokens_of_step: int


Event = Written | AnswersProgress | Read | Begun | Report
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Trained:
    """A finished drafter.

    Attributes:
        drafter: as it was trained; on disk it is in bf16 or fewer bits.
        config: its config.json.
        held_out: the samples that it never saw.
        begun: the size of the work.
        curve: [step, loss, held-out loss, held-out acceptance length] of each validation.
    """

    drafter: DFlash
    config: dict[str, Any]
    held_out: list[Sample]
    begun: Begun
    curve: list[list[float]]


def train(
    target: Target,
    out: Path,
    recipe: Recipe,
    warm: tuple[DFlash, dict[str, Any]] | None = None,
    listen: Listener = lambda event: None,
) -> Trained:
    """Train a drafter for a target, or go on with it, and save it in `out`.

    Args:
        out: the drafter's folder; its folder "work" holds what is needed to go on.
        recipe: what to do; an unfinished run goes on with its own recipe only.
        warm: a drafter to start from and its config.json, which decides the shape.
        listen: gets an event now and then, and a `Report` after every step.

    Raises:
        SettingsError: a recipe that cannot be, or is not that of the unfinished run; or another
            process is at work in `out`.
        DataError: a broken line, a file without samples; PromptError: no chat template.
        NotEnoughMemoryError, OutputError: too little memory or disk; IncompatibleDrafterError.
    """
    work = out / "work"
    _judge(target, recipe, warm, work)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError.because(work, error) from error
    with sole_use(work):
        return _train(target, out, work, recipe, warm, listen)


def _train(
    target: Target,
    out: Path,
    work: Path,
    recipe: Recipe,
    warm: tuple[DFlash, dict[str, Any]] | None,
    listen: Listener,
) -> Trained:
    """The same, where all that can be judged is, and nobody else writes into the folder."""
    claim(work, target, recipe)
    begin = time.monotonic()
    samples = gather(target, work, recipe, listen)
    held_out, training = split(samples, recipe)
    raw = _shape(target, recipe, samples, warm)
    config = DraftConfig.from_dict(raw)
    settings = _settings(recipe, training)
    cached = sum(len(s.tokens) for s in samples) if recipe.cache_features else 0
    needed = estimate(target, config, settings, [len(s.tokens) for s in samples], cached)
    check(needed, work, recipe.tokens, recipe.anchors)
    store = None
    if recipe.cache_features:

        def seen(done: int, all: int) -> None:
            listen(Read(done, all, needed.features))

        store = build_store(target, samples, config.target_layer_ids, work / "features", seen)
    start = _start(target, config, recipe, warm, training)
    if recipe.hours is not None:
        settings = _timed(target, config, settings, training, start, store, work, recipe, begin)
    begun = Begun(
        samples=len(training),
        held_out=len(held_out),
        tokens=sum(len(s.tokens) for s in training),
        answer_tokens=sum(b - a for s in training for a, b in s.answers),
        steps=settings.steps,
        estimate=needed,
        tokens_of_step=2 * recipe.tokens,
    )
    listen(begun)
    curve = _Curve(work / "curve.jsonl", listen)
    drafter = train_drafter(
        target,
        config,
        lambda epoch: training,
        settings,
        held_out,
        work / "checkpoint.safetensors",
        curve,
        start,
        store,
        fresh=warm is None and recipe.warm_start is None,
    )
    try:
        save_drafter(drafter, raw, out)
        lines = "".join(json.dumps(held_out_record(target, s)) + "\n" for s in held_out)
        (out / "held_out.jsonl").write_text(lines, encoding="utf-8")
    except OSError as error:
        raise OutputError.because(out, error) from error
    return Trained(drafter, raw, held_out, begun, curve.points())


def _judge(
    target: Target, recipe: Recipe, warm: tuple[DFlash, dict[str, Any]] | None, work: Path
) -> None:
    """Raise for all that can be known before anything is answered or written."""
    if not recipe.keep_answers:
        user_header(target)
    config = DraftConfig.from_dict(_shape(target, recipe, (), warm))
    config.check_fits(target.hidden_size, target.vocab_size, target.num_layers)
    check_trainable(config)
    # The longest that samples can be, of which a batch takes the least; of a file's, who knows.
    longest = recipe.turn_tokens + recipe.max_tokens if recipe.synthesize else recipe.tokens
    least = estimate(target, config, _settings(recipe, ()), [longest])
    check(least, work, recipe.tokens, recipe.anchors)


def held_out_record(target: Target, sample: Sample) -> dict[str, Any]:
    """A line of held_out.jsonl: the text before an answer as token ids, and the answer's text."""
    start, end = sample.answers[-1]
    text = target.tokenizer.decode(list(sample.tokens[start:end]), skip_special_tokens=True)
    return {"ids": list(sample.tokens[:start]), "answer": text}


def _shape(
    target: Target,
    recipe: Recipe,
    samples: Sequence[Sample],
    warm: tuple[DFlash, dict[str, Any]] | None,
) -> dict[str, Any]:
    """The config.json of the drafter."""
    if warm is not None:
        raw = dict(warm[1])
        raw.pop("quantization", None)
    else:
        used = {token for sample in samples for token in sample.tokens}
        mask = mask_token(target, used)
        raw = draft_shape(
            target,
            recipe.kind,
            recipe.block_size,
            mask,
            recipe.layers,
            recipe.causal,
            recipe.draft_tokens,
        )
    if recipe.bits is not None:
        raw["quantization"] = {
            "group_size": 64 if target.hidden_size % 64 == 0 else 32,
            "bits": recipe.bits,
        }
    return raw


def _start(
    target: Target,
    config: DraftConfig,
    recipe: Recipe,
    warm: tuple[DFlash, dict[str, Any]] | None,
    training: Sequence[Sample],
) -> DFlash:
    """The drafter that training starts from."""
    drafter = new_drafter(config, recipe.seed)
    if recipe.draft_tokens is not None:
        known = frequent(training, config.draft_vocab_size, target.vocab_size)
        start_own_head(drafter, target, known)
    if warm is not None:
        drafter.update(warm[0].parameters())
    elif recipe.warm_start == TARGET:
        start_from_target(drafter, target)
    return drafter


def _settings(recipe: Recipe, training: Sequence[Sample]) -> DrafterSettings:
    """How long to train, and on how much at once."""
    tokens = sum(bucket_length(len(sample.tokens)) for sample in training)
    steps = recipe.steps or max(1, round(EPOCHS * tokens / (2 * recipe.tokens)))
    every = max(1, min(50, steps // 10))
    return DrafterSettings(
        steps=steps,
        tokens=recipe.tokens,
        anchors=recipe.anchors,
        learning_rate=recipe.learning_rate,
        optimizer=recipe.optimizer,
        mix=recipe.mix,
        occurring=recipe.occurring,
        seed=recipe.seed,
        save_every=every,
        validate_every=every,
    )


def seconds_of_steps(hours: float, spent: float) -> float:
    """What is left for steps of some hours after `spent` seconds of prompts and answers."""
    whole = 3600 * hours
    return max(whole - spent, STEPS_SHARE * whole)


def _timed(
    target: Target,
    config: DraftConfig,
    settings: DrafterSettings,
    training: list[Sample],
    start: DFlash,
    store: Store | None,
    work: Path,
    recipe: Recipe,
    begin: float,
) -> DrafterSettings:
    """The settings with as many steps as fit into the hours, counted once and written down.

    The prompts and answers that were made since `begin` have taken their part of the hours.

    A schedule that looked at the clock would give another drafter after every interruption.
    """
    path = work / "steps.json"
    if not path.exists():
        trial, times = new_drafter(config, recipe.seed), []
        trial.update(start.parameters())

        def note(report: Report) -> None:
            times.append(time.monotonic())

        few = replace(settings, steps=TIMED_STEPS + 1, save_every=0, validate_every=0)
        train_drafter(
            target, config, lambda e: training, few, progress=note, drafter=trial, store=store
        )
        seconds = (times[-1] - times[0]) / TIMED_STEPS
        left = seconds_of_steps(recipe.hours or 0, times[0] - begin)
        steps = max(1, round(left / seconds))
        path.write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
    every = max(1, min(50, steps // 10))
    return replace(settings, steps=steps, save_every=every, validate_every=every)


class _Curve:
    """Passes reports on, and keeps those of validations for the plot and the card."""

    def __init__(self, path: Path, listen: Listener) -> None:
        self._path, self._listen = path, listen

    def __call__(self, report: Report) -> None:
        if report.held_out_loss is not None:
            row = [report.step, report.loss, report.held_out_loss, report.held_out_metric]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._listen(report)

    def points(self) -> list[list[float]]:
        """One point a step: what was measured again after an interruption is the same."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.endswith("]")]
        return [*{row[0]: row for row in rows}.values()]
