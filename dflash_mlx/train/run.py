"""Trains a drafter for a target and saves it: prompts, answers, features, training.

All intermediate files are in OUT/work, so the same call continues an interrupted run, and ends with
bitwise the same drafter: each stage depends only on the files of earlier ones and on the seed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..drafter.config import DraftConfig
from ..drafter.dflash import DFlash
from ..errors import OutputError, SettingsError
from ..targets import Target
from ..validation import path_kind
from .answer_writer import AnswerProgress, AnswerSettings, collect_samples, split
from .dataset import Sample, bucket_length
from .drafter import (
    DrafterSettings,
    check_trainable,
    common_tokens,
    save_drafter,
    train_drafter,
)
from .fit import StepReport
from .initial import draft_config, mask_token
from .losses import LossWeights
from .recipe import EPOCHS, Recipe, claim_folder
from .step_memory import check_memory, memory_needed
from .synthesize import TurnProgress, turn_start, user_header, write_turns

# For --hours, this many steps are timed first.
TIMED_STEPS = 4
# At least this share of the hours is left for steps, however long prompts and answers took.
MIN_STEPS_SHARE = 0.5


@dataclass(frozen=True)
class TrainingPlan:
    """The size of the training that starts now."""

    samples: int
    held_out: int
    tokens: int
    answer_tokens: int
    steps: int
    memory_bytes: int  # estimated
    tokens_of_step: int


WarmStart = tuple[DFlash, dict[str, Any]]  # a drafter and its config.json
Event = TurnProgress | AnswerProgress | TrainingPlan | StepReport
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Trained:
    """A finished drafter.

    Attributes:
        drafter: in f32; on disk it is in bf16 or fewer bits.
        config: its config.json.
        plan: the size of the training.
    """

    drafter: DFlash
    config: dict[str, Any]
    plan: TrainingPlan


def train(
    target: Target,
    out: Path,
    recipe: Recipe,
    warm: WarmStart | None = None,
    listen: Listener = lambda event: None,
) -> Trained:
    """Train a drafter for a target, or continue, and save it in `out`.

    Args:
        out: the drafter's folder; its subfolder "work" holds intermediate files.
        recipe: the settings; an unfinished run continues with the same settings only.
        warm: a drafter to start from and its config.json, which sets the shape.
        listen: called with progress events, and with a `StepReport` after every step.

    Raises:
        SettingsError: invalid settings, or other settings than those of the unfinished run.
        DataError: a broken line or too few samples; PromptError: no chat template.
        NotEnoughMemoryError, OutputError, IncompatibleDrafterError.
    """
    work = out / "work"
    _check_before(target, recipe, warm)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError.because(work, error) from error
    claim_folder(work, target, recipe)
    begin = time.monotonic()
    turns = _write_turns(target, recipe, work, listen)
    samples = collect_samples(target, work=work, recipe=recipe, turns=turns, listen=listen)
    held_out, training = split(samples, recipe)
    raw = _drafter_fields(target, recipe=recipe, samples=training, warm=warm)
    config = DraftConfig.from_dict(raw)
    tokens = sum(bucket_length(len(sample.tokens), recipe.tokens) for sample in training)
    # A step has two batches of `recipe.tokens`.
    steps_of_epochs = max(1, round(EPOCHS * tokens / (2 * recipe.tokens)))
    settings = _settings(recipe, recipe.steps or steps_of_epochs)
    lengths = [len(sample.tokens) for sample in samples]
    needed = memory_needed(target, config=config, settings=settings, lengths=lengths)
    check_memory(needed, settings)
    start = None if warm is None else warm[0]
    if recipe.hours is not None:
        steps = _steps_in_hours(
            target,
            config=config,
            settings=settings,
            training=training,
            start=start,
            work=work,
            recipe=recipe,
            begin=begin,
        )
        settings = _settings(recipe, steps)
    plan = TrainingPlan(
        samples=len(training),
        held_out=len(held_out),
        tokens=sum(len(sample.tokens) for sample in training),
        answer_tokens=sum(_answer_tokens(sample) for sample in training),
        steps=settings.steps,
        memory_bytes=needed,
        tokens_of_step=2 * recipe.tokens,
    )
    listen(plan)
    drafter = train_drafter(
        target,
        config=config,
        samples=lambda epoch: training,
        settings=settings,
        held_out=held_out,
        checkpoint=work / "checkpoint.safetensors",
        progress=listen,
        start=start,
        kept=work / "features" if recipe.keep_features else None,
    )
    _save(drafter, raw, out, target=target, held_out=held_out)
    return Trained(drafter, raw, plan)


def _check_before(target: Target, recipe: Recipe, warm: WarmStart | None) -> None:
    """Check everything that can be checked before anything is generated or written."""
    if recipe.synthesize is not None:
        turn_start(target)
    elif not recipe.keep_answers:
        user_header(target)
    config = DraftConfig.from_dict(_drafter_fields(target, recipe=recipe, samples=(), warm=warm))
    config.check_fits(target.hidden_size, target.vocab_size, target.num_layers)
    check_trainable(config)
    if recipe.draft_vocab and (config.kind == "dflash2" or (warm and "lm_head" in warm[0])):
        raise SettingsError("--draft-vocab is not for dflash2 or a drafter with its own head.")
    # Long samples need less memory than short ones, and a file's lengths are not known yet.
    longest = recipe.turn_tokens + recipe.max_tokens if recipe.synthesize else recipe.tokens
    settings = _settings(recipe, 1)
    check_memory(
        memory_needed(target, config=config, settings=settings, lengths=[longest]), settings
    )


def _write_turns(target: Target, recipe: Recipe, work: Path, listen: Listener) -> list[str]:
    """Have the target write the user's turns; none if the recipe reads prompts from a file."""
    if recipe.synthesize is None:
        return []
    return write_turns(
        target,
        count=recipe.synthesize,
        path=work / "turns.jsonl",
        settings=AnswerSettings(
            max_tokens=recipe.turn_tokens, rows=recipe.rows, chunk=2 * recipe.rows
        ),
        seed=recipe.seed,
        progress=listen,
    )


def _answer_tokens(sample: Sample) -> int:
    return sum(end - start for start, end in sample.answers)


def _save(
    drafter: DFlash,
    raw: dict[str, Any],
    out: Path,
    target: Target,
    held_out: Sequence[Sample],
) -> None:
    """Write the drafter and then held_out.jsonl. Raises `OutputError`."""
    try:
        save_drafter(drafter, raw, out)
        lines = [json.dumps(held_out_record(target, sample)) + "\n" for sample in held_out]
        (out / "held_out.jsonl").write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise OutputError.because(out, error) from error


def held_out_record(target: Target, sample: Sample) -> dict[str, Any]:
    """A line of held_out.jsonl: token ids before the last answer, and the answer's text."""
    start, end = sample.answers[-1]
    text = target.tokenizer.decode(list(sample.tokens[start:end]), skip_special_tokens=True)
    return {"ids": list(sample.tokens[:start]), "answer": text}


def _drafter_fields(
    target: Target,
    recipe: Recipe,
    samples: Sequence[Sample],
    warm: WarmStart | None,
) -> dict[str, Any]:
    """The config.json of the drafter."""
    if warm is not None:
        raw = dict(warm[1])
        raw.pop("quantization", None)
    else:
        used = {token for sample in samples for token in sample.tokens}
        mask = mask_token(target, used)
        raw = draft_config(
            target,
            kind=recipe.kind,
            block_size=recipe.block_size,
            mask_token=mask,
            layers=recipe.layers,
            causal=recipe.causal,
        )
    if recipe.draft_vocab is not None and samples:
        count = len(common_tokens(samples, recipe.draft_vocab))
        raw |= {"draft_vocab_size": count, "tie_word_embeddings": False}
    if recipe.bits is not None:
        raw["quantization"] = {
            "group_size": 64 if target.hidden_size % 64 == 0 else 32,
            "bits": recipe.bits,
        }
    return raw


def _settings(recipe: Recipe, steps: int) -> DrafterSettings:
    """The settings of a training with this many steps."""
    return DrafterSettings(
        steps=steps,
        tokens=recipe.tokens,
        anchors=recipe.anchors,
        learning_rate=recipe.learning_rate,
        optimizer=recipe.optimizer,
        loss_weights=LossWeights(cross_entropy=0.5, kl=0.5),
        seed=recipe.seed,
        every=max(1, min(50, steps // 10)),
    )


def _steps_in_hours(
    target: Target,
    config: DraftConfig,
    settings: DrafterSettings,
    training: list[Sample],
    start: DFlash | None,
    work: Path,
    recipe: Recipe,
    begin: float,
) -> int:
    """The number of steps that fit into the hours, measured once and stored.

    The hours begin at `begin`, when the first prompt is written. The number is stored because a
    schedule that depends on the clock would train another drafter after every interruption.
    """
    path = work / "steps.json"
    if path_kind(path) is None:
        times: list[float] = []
        train_drafter(
            target,
            config=config,
            samples=lambda epoch: training,
            settings=replace(settings, steps=TIMED_STEPS + 1, every=0),
            progress=lambda report: times.append(time.monotonic()),
            start=start,
        )
        seconds = (times[-1] - times[0]) / TIMED_STEPS
        budget = 3600 * (recipe.hours or 0)
        remaining = max(budget - (times[0] - begin), MIN_STEPS_SHARE * budget)
        steps = max(1, round(remaining / seconds))
        path.write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")
    return int(json.loads(path.read_text(encoding="utf-8"))["steps"])
