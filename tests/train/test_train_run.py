"""Training runs, from a target to a drafter on disk: results, resuming, and errors of one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tinymodels
from mlx.utils import tree_flatten
from program import run, start
from tinymodels import END, LINES

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import (
    DataError,
    DFlashError,
    IncompatibleDrafterError,
    NotEnoughMemoryError,
    PromptError,
    SettingsError,
)
from dflash_mlx.loading.load import load_drafter
from dflash_mlx.loop import generate
from dflash_mlx.machine.saving import save_arrays
from dflash_mlx.targets import Target
from dflash_mlx.train import answer_writer, step_memory
from dflash_mlx.train.answer_writer import AnswerProgress
from dflash_mlx.train.dataset import Sample
from dflash_mlx.train.drafter import head_parts, new_drafter
from dflash_mlx.train.features import KeptFeatures, features
from dflash_mlx.train.fit import StepReport
from dflash_mlx.train.initial import draft_config, mask_token, tap_layers
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import TrainingPlan, train

PROMPTS = [{"prompt": line[: 12 + 4 * i]} for i in range(3) for line in LINES]


@pytest.fixture(scope="module")
def target() -> Target:
    return tinymodels.target()


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in PROMPTS))
    return path


def recipe(data: Path, **more: Any) -> Recipe:
    """A recipe for a short run, with some settings changed."""
    small = {"steps": 3, "block_size": 4, "max_tokens": 10, "rows": 4, "anchors": 4, "tokens": 64}
    return Recipe(data=data, **{**small, **more})


@pytest.mark.parametrize(
    ("kind", "tokens"), [("dflash", None), ("dflash", 3), ("dflash2", None), ("dspark", 3)]
)
def test_a_run_writes_a_drafter_that_loads_and_drafts(tmp_path, target, data, kind, tokens):
    events = []
    chosen = recipe(data, kind=kind, bits=8, draft_vocab=tokens)
    train(target, tmp_path / "out", chosen, listen=events.append)
    assert [event.step for event in events if isinstance(event, StepReport)] == [1, 2, 3]
    [plan] = [event for event in events if isinstance(event, TrainingPlan)]
    assert plan.samples + plan.held_out == len(PROMPTS)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "qwen3"
    tied = tokens is None and target.config["tie_word_embeddings"]
    assert written["tie_word_embeddings"] is tied
    drafter = load_drafter(str(tmp_path / "out"))
    ids = drafter.token_ids()
    if tokens is None:
        assert ids is None
    else:
        rows = target.head_rows(ids)
        assert rows.shape[0] == tokens
        assert mx.allclose(drafter.lm_head.weight, rows, atol=0.02)
    lines = (tmp_path / "out" / "held_out.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert END not in record["answer"]
        drafted = generate(target, drafter, record["ids"], max_tokens=10).tokens
        assert drafted == tinymodels.greedy(target, record["ids"], 10)


def stop_at_second(kind: type) -> Callable[[Any], None]:
    """A listener that interrupts a run at its second event of a kind."""
    events = []

    def listen(event: Any) -> None:
        if isinstance(event, kind):
            events.append(event)
            if len(events) == 2:
                raise KeyboardInterrupt

    return listen


def test_a_run_that_was_stopped_twice_ends_with_the_same_bits(tmp_path, target, data):
    """Once while it writes answers, and once while it trains.

    test_train_answers.py tests half-written answers; a checkpoint is never half-written.
    """
    chosen = recipe(data, steps=4, rows=2)
    for kind in (AnswerProgress, StepReport):
        with pytest.raises(KeyboardInterrupt):
            train(target, tmp_path / "stopped", chosen, listen=stop_at_second(kind))
    events = []
    train(target, tmp_path / "stopped", chosen, listen=events.append)
    assert [event.step for event in events if isinstance(event, StepReport)] == [2, 3, 4]
    train(target, tmp_path / "uninterrupted", chosen)
    expected = (tmp_path / "uninterrupted" / "model.safetensors").read_bytes()
    assert (tmp_path / "stopped" / "model.safetensors").read_bytes() == expected


def test_the_command_trains_and_writes_a_card(tmp_path, data):
    """For a fine-tuned model (an adapter), starting from a drafter of the original model."""
    model = tinymodels.save_target(tmp_path / "model")
    out = tmp_path / "out"
    adapter = tinymodels.save_adapter(tmp_path / "adapter", model, "lora")
    options = ["--model", model, "--data", data, "--steps", "1", "--adapter", adapter, "--json"]
    options += ["--warm-start", tinymodels.save_drafter(tmp_path / "drafter")]
    options += ["--answer-tokens", "10", "--rows", "4", "--anchors", "4", "--tokens", "64"]
    result = start("train", *options, "--out", out)
    assert result.returncode == 0, result.stderr
    events = [json.loads(line)["event"] for line in result.stdout.splitlines()]
    assert list(dict.fromkeys(events)) == ["answers", "plan", "step", "done"]
    card = (out / "README.md").read_text()
    assert "tokens per step" in card and f"--model {model} --adapter {adapter} --draft" in card


def test_a_run_is_not_continued_with_another_recipe(tmp_path, target, data):
    train(target, tmp_path / "out", recipe(data))
    with pytest.raises(SettingsError, match=r"other settings \(anchors, steps\): use"):
        train(target, tmp_path / "out", recipe(data, steps=5, anchors=3))
    data.write_text(json.dumps(PROMPTS[0]) + "\n")
    with pytest.raises(SettingsError, match=r"other settings \(data\)"):
        train(target, tmp_path / "out", recipe(data))


def test_a_folder_of_a_run_that_failed_at_once_can_be_used_for_another_recipe(
    tmp_path, target, data
):
    """Otherwise a user who repairs a broken data file would also have to delete the folder."""
    valid = data.read_text()
    data.write_text(valid + '{"prompt": broken')
    with pytest.raises(DataError, match="not valid JSON"):
        train(target, tmp_path / "out", recipe(data))
    data.write_text(valid)
    train(target, tmp_path / "out", recipe(data, steps=1))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_hours_are_converted_to_steps_which_are_stored_for_resuming(tmp_path, target, data):
    events: list[Any] = []
    in_hours = recipe(data, steps=None, hours=1e-9)
    train(target, tmp_path / "out", in_hours, listen=events.append)
    steps = json.loads((tmp_path / "out" / "work" / "steps.json").read_text())["steps"]
    assert [event.steps for event in events if isinstance(event, TrainingPlan)] == [steps]


def test_texts_and_answers_of_the_data_are_used_with_keep_answers(tmp_path, target):
    """Nothing is answered by the target."""
    path = tmp_path / "mixed.jsonl"
    out = tmp_path / "out"
    records = [{"text": line} for line in LINES]
    records += [{"prompt": "user asks", "answer": line} for line in LINES]
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    result = train(target, out, recipe(path, keep_answers=True))
    assert result.plan.samples + result.plan.held_out == 8
    assert not (out / "work" / "answers.jsonl").exists()


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_continues_from_a_drafter_with_a_reduced_vocabulary(tmp_path, target, data, kind):
    """It keeps that vocabulary and the rows of its head, and its loss becomes lower."""
    tokens = mx.array([3, 5, 7, 8, 9, 11, 14, 20])
    raw = draft_config(target, kind=kind, block_size=4, mask_token=1) | {
        "draft_vocab_size": len(tokens)
    }
    warm = new_drafter(DraftConfig.from_dict(raw), seed=1)
    head = head_parts(target, tokens)
    warm.load_weights([*head.items()], strict=False)
    events: list[Any] = []
    chosen = recipe(data, steps=30, learning_rate=0.01, keep_answers=False)
    result = train(
        target, out=tmp_path / "out", recipe=chosen, warm=(warm, raw), listen=events.append
    )
    losses = [event.loss for event in events if isinstance(event, StepReport)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert mx.array_equal(result.drafter.token_ids(), tokens)
    assert mx.allclose(result.drafter.lm_head.weight, head["lm_head.weight"])
    assert load_drafter(str(tmp_path / "out")).token_ids().tolist() == tokens.tolist()
    with pytest.raises(SettingsError, match="--draft-vocab is not for"):
        train(target, out=tmp_path / "other", recipe=recipe(data, draft_vocab=3), warm=(warm, raw))


def test_training_on_stored_features_gives_the_same_losses(tmp_path, target, data):
    """And a run that starts again, after its checkpoint was lost, finds the stored features."""

    def losses_of_run(keep_features: bool) -> list[float]:
        out = tmp_path / f"keep features {keep_features}"
        events: list[Any] = []
        train(target, out, recipe(data, keep_features=keep_features), listen=events.append)
        (out / "work" / "checkpoint.safetensors").unlink(missing_ok=True)
        return [event.loss for event in events if isinstance(event, StepReport)]

    computed = losses_of_run(keep_features=False)
    stored = losses_of_run(keep_features=True)
    assert computed == pytest.approx(stored, rel=0.02)
    assert losses_of_run(keep_features=True) == stored


def test_stored_features_are_those_of_the_requested_layers(tmp_path, target):
    """Another drafter to start from may tap other layers."""
    sample = Sample(tuple(range(3, 20)), ((5, 17),))
    for layers in ([0], [1], [0, 1]):
        kept = KeptFeatures(target, layers, tmp_path)([sample], 17)
        expected = features(target, mx.array([sample.tokens]), layers)
        assert mx.array_equal(kept.taps, expected.taps.astype(mx.bfloat16))


def test_two_processes_may_save_into_one_folder_at_the_same_time(tmp_path, monkeypatch):
    """Here the second one saves while the first one has not yet renamed its temporary file."""
    original_save = mx.save_safetensors

    def save_and_interrupt(*arguments, **metadata):
        original_save(*arguments, **metadata)
        monkeypatch.setattr(mx, "save_safetensors", original_save)
        save_arrays(tmp_path / "two.safetensors", {"a": mx.zeros(2)}, {})

    monkeypatch.setattr(mx, "save_safetensors", save_and_interrupt)
    save_arrays(tmp_path / "one.safetensors", {"a": mx.zeros(1)}, {})
    assert len(mx.load(str(tmp_path / "one.safetensors"))["a"]) == 1
    assert len(mx.load(str(tmp_path / "two.safetensors"))["a"]) == 2


def test_training_starts_from_a_published_drafter(tmp_path, target, data):
    """It keeps the drafter's config and weights, or gets a reduced vocabulary; it must fit."""
    folder = tinymodels.save_drafter(tmp_path / "warm", seed=3, block_size=4)
    raw = json.loads((folder / "config.json").read_text())
    warm = load_drafter(str(folder))
    before = dict(tree_flatten(warm.parameters()))
    result = train(
        target,
        out=tmp_path / "out",
        recipe=recipe(data, steps=1, learning_rate=1e-9),
        warm=(warm, raw),
    )
    assert result.config == raw
    for name, weight in tree_flatten(result.drafter.parameters()):
        assert mx.allclose(weight, before[name], atol=1e-5), name
    reduced = train(
        target, out=tmp_path / "few", recipe=recipe(data, steps=1, draft_vocab=3), warm=(warm, raw)
    )
    assert reduced.drafter.lm_head.weight.shape == (3, target.hidden_size)
    other = raw | {"hidden_size": 32}
    drafter = new_drafter(DraftConfig.from_dict(other), 0)
    with pytest.raises(IncompatibleDrafterError):
        train(target, out=tmp_path / "other", recipe=recipe(data), warm=(drafter, other))


@pytest.mark.parametrize(
    ("layers", "taps"), [(3, [1, 2]), (6, [1, 3, 5]), (36, [1, 9, 17, 25, 33]), (1, [0])]
)
def test_tapped_layers_are_spread_over_the_target(layers, taps):
    assert tap_layers(layers) == taps


def test_the_mask_token_is_one_that_no_sample_contains(target):
    all_tokens = set(range(target.vocab_size))
    assert target.tokenizer.eos_token_id != 7
    assert mask_token(target, all_tokens - {7}) == 7
    with pytest.raises(SettingsError, match="every token occurs"):
        mask_token(target, all_tokens)


def test_a_missing_chat_template_is_an_error_before_anything_is_written(tmp_path, data, target):
    bare = tinymodels.ending_at(target)
    bare.tokenizer.has_chat_template = False
    try:
        with pytest.raises(PromptError, match="no chat template"):
            train(bare, tmp_path / "out", recipe(data))
        assert not (tmp_path / "out").exists()
    finally:
        bare.tokenizer.has_chat_template = True


def test_errors_of_the_command_have_one_line(tmp_path):
    for options in (
        ["--data", tmp_path / "nothing.jsonl"],
        ["--synthesize", "2", "--warm-start", "no/such/drafter"],
    ):
        result = run("train", "--out", tmp_path / "out", "--offline", *options)
        assert result.returncode == 1 and result.stderr.startswith("error: "), result.stderr
        assert result.stderr.count("\n") == 1
    assert run("train", "--out", tmp_path / "out").returncode == 2


# Refused before anything is answered or written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "2", "--hours", "1"], "not both"),
        (["--keep-answers"], "needs --data"),
        (["--data", "x.jsonl"], "either a file"),
        (["--hours", "0"], "above 0"),
        (["--learning-rate", "0"], "above 0"),
        (["--seed", str(2**64)], "from 0 to 4,294,967,295"),
        (["--warm-start", "tiny", "--layers", "2"], "--warm-start"),
    ],
)
def test_invalid_options_are_refused_before_a_model_is_loaded(
    tmp_path, options, message, monkeypatch
):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded before the options are checked")

    monkeypatch.setattr("dflash_mlx.load_target", load)
    out = tmp_path / "out"
    result = run("train", "--synthesize", "2", "--out", out, *options, COLUMNS="200")
    assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "depth", "message"),
    [
        ({"layers": 4}, None, "lower --layers"),
        ({"block_size": 5000}, None, "block_size"),
        ({}, 30, "another target"),
    ],
)
def test_a_wrong_shape_is_an_error_before_anything_is_answered(
    tmp_path, target, settings, depth, message
):
    folder = tinymodels.save_drafter(tmp_path / "warm", seed=3, block_size=4)
    warm = None
    if depth is not None:
        raw = json.loads((folder / "config.json").read_text())
        warm = (load_drafter(str(folder)), raw | {"num_target_layers": depth})
    with pytest.raises(DFlashError, match=message):
        train(target, out=tmp_path / "out", recipe=Recipe(synthesize=2, **settings), warm=warm)
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_an_error_before_anything_is_answered(
    tmp_path, target, data, monkeypatch
):
    """On a Mac the GPU's recommended working set counts, not all of the memory."""
    out = tmp_path / "out"
    large = recipe(data, anchors=16, tokens=256)
    small_gpu = {"max_recommended_working_set_size": 10**6}
    monkeypatch.setattr(mx, "device_info", lambda: small_gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(NotEnoughMemoryError, match=r"lower --tokens \(256\), --anchors \(16\)"):
        train(target, out, large)
    assert not out.exists()


def test_answers_are_reused_with_smaller_batches_if_memory_was_too_small(
    tmp_path, target, data, monkeypatch
):
    """The memory of a batch is known only after answering."""
    events: list[Any] = []
    large = recipe(data, steps=1, anchors=16, tokens=256)
    train(target, tmp_path / "free", large, listen=events.append)
    [needed] = [event.memory_bytes for event in events if isinstance(event, TrainingPlan)]
    monkeypatch.setattr(step_memory, "usable_bytes", lambda: needed - 1)
    out = tmp_path / "out"
    with pytest.raises(NotEnoughMemoryError, match="lower --tokens"):
        train(target, out, large)

    def answer(*_: Any, **__: Any) -> None:
        raise AssertionError("the prompts are answered again")

    monkeypatch.setattr(answer_writer, "complete_prompts", answer)
    train(target, out, replace(large, tokens=64))
    with pytest.raises(SettingsError, match=r"other settings \(tokens\)"):  # there are steps now
        train(target, out, large)
