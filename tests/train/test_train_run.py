"""From a target to a drafter on disk: resumed bit for bit, refused in one line."""

import json
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
    small = {"steps": 3, "block_size": 4, "max_tokens": 10, "rows": 4, "anchors": 4, "tokens": 64}
    return Recipe(data=data, **{**small, **more})


@pytest.mark.parametrize(
    ("kind", "tokens"), [("dflash", None), ("dflash", 3), ("dflash2", None), ("dspark", 3)]
)
def test_a_drafter_comes_out_that_drafts(tmp_path, target, data, kind, tokens):
    seen = []
    chosen = recipe(data, kind=kind, bits=8, draft_vocab=tokens)
    train(target, tmp_path / "out", chosen, listen=seen.append)
    assert [event.step for event in seen if isinstance(event, StepReport)] == [1, 2, 3]
    [plan] = [event for event in seen if isinstance(event, TrainingPlan)]
    assert plan.samples + plan.held_out == len(PROMPTS)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "qwen3"
    tied = tokens is None and target.config["tie_word_embeddings"]
    assert written["tie_word_embeddings"] is tied
    drafter = load_drafter(str(tmp_path / "out"))
    if (ids := drafter.token_ids()) is not None:
        rows = target.head_rows(ids)
        assert rows.shape[0] == tokens and mx.allclose(drafter.lm_head.weight, rows, atol=0.02)
    assert (ids is None) == (tokens is None)
    lines = (tmp_path / "out" / "held_out.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert END not in record["answer"]
        drafted = generate(target, drafter, record["ids"], max_tokens=10).tokens
        assert drafted == tinymodels.greedy(target, record["ids"], 10)


def test_a_run_that_was_stopped_twice_ends_with_the_same_bits(tmp_path, target, data):
    """What a kill leaves half-written is in test_train_answers; a checkpoint is written whole."""
    chosen = recipe(data, steps=4, rows=2)
    steps = []
    for kind in (AnswerProgress, StepReport):
        seen = []

        def stop(event, kind=kind, seen=seen):
            seen += [event] if isinstance(event, kind) else []
            if len(seen) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(target, tmp_path / "stopped", chosen, listen=stop)
    train(target, tmp_path / "stopped", chosen, listen=lambda event: steps.append(event))
    assert [event.step for event in steps if isinstance(event, StepReport)] == [2, 3, 4]
    train(target, tmp_path / "whole", chosen)
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "stopped"))
    assert first.read_bytes() == second.read_bytes()


def test_the_command_trains_and_writes_a_card(tmp_path, data):
    """Also for a tuned model, from a drafter of the original."""
    model = tinymodels.save_target(tmp_path / "model")
    out = tmp_path / "out"
    adapter = tinymodels.save_adapter(tmp_path / "adapter", model, "lora")
    options = ["--model", model, "--data", data, "--steps", "1", "--adapter", adapter, "--json"]
    options += ["--warm-start", tinymodels.save_drafter(tmp_path / "drafter")]
    options += ["--answer-tokens", "10", "--rows", "4", "--anchors", "4", "--tokens", "64"]
    done = start("train", *options, "--out", out)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
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


def test_a_folder_where_nothing_was_made_is_free_for_another_recipe(tmp_path, target, data):
    """Otherwise a user who repairs a broken file would also have to delete the folder."""
    whole = data.read_text()
    data.write_text(whole + '{"prompt": broken')
    with pytest.raises(DataError, match="not valid JSON"):
        train(target, tmp_path / "out", recipe(data))
    data.write_text(whole)
    train(target, tmp_path / "out", recipe(data, steps=1))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_hours_become_steps_once(tmp_path, target, data):
    seen: list[Any] = []
    hours = recipe(data, steps=None, hours=1e-9)
    train(target, tmp_path / "out", hours, listen=seen.append)
    steps = json.loads((tmp_path / "out" / "work" / "steps.json").read_text())["steps"]
    assert [event.steps for event in seen if isinstance(event, TrainingPlan)] == [steps]


def test_texts_and_given_answers_are_learnt_as_they_are(tmp_path, target):
    path = tmp_path / "mixed.jsonl"
    out = tmp_path / "out"
    records = [{"text": line} for line in LINES]
    records += [{"prompt": "user asks", "answer": line} for line in LINES]
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    done = train(target, out, recipe(path, keep_answers=True))
    assert done.plan.samples + done.plan.held_out == 8
    assert not (out / "work" / "answers.jsonl").exists()


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_drafter_with_a_head_of_fewer_tokens_learns_on(tmp_path, target, data, kind):
    """Its own tokens are drafted: labels, Markov head and drafts are in their numbers."""
    tokens = mx.array([3, 5, 7, 8, 9, 11, 14, 20])
    raw = draft_config(target, kind=kind, block_size=4, mask_token=1) | {
        "draft_vocab_size": len(tokens)
    }
    warm = new_drafter(DraftConfig.from_dict(raw), seed=1)
    head = head_parts(target, tokens)
    warm.load_weights([*head.items()], strict=False)
    seen: list[Any] = []
    chosen = recipe(data, steps=30, learning_rate=0.01, keep_answers=False)
    done = train(target, out=tmp_path / "out", recipe=chosen, warm=(warm, raw), listen=seen.append)
    losses = [event.loss for event in seen if isinstance(event, StepReport)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert mx.array_equal(done.drafter.token_ids(), tokens)
    assert mx.allclose(done.drafter.lm_head.weight, head["lm_head.weight"])
    assert load_drafter(str(tmp_path / "out")).token_ids().tolist() == tokens.tolist()
    with pytest.raises(SettingsError, match="--draft-vocab is not for"):
        train(target, out=tmp_path / "other", recipe=recipe(data, draft_vocab=3), warm=(warm, raw))


def test_kept_features_teach_the_same(tmp_path, target, data):
    """Each is computed once, and a run that begins again finds it."""
    losses = []
    for kept in (False, True, True):
        seen: list[Any] = []
        train(target, tmp_path / f"{kept}", recipe(data, keep_features=kept), listen=seen.append)
        losses.append([event.loss for event in seen if isinstance(event, StepReport)])
        (tmp_path / f"{kept}" / "work" / "checkpoint.safetensors").unlink(missing_ok=True)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[1] == losses[2]


def test_features_are_kept_for_each_choice_of_layers(tmp_path, target):
    """A drafter to start from may tap other layers than the one before it."""
    sample = Sample(tuple(range(3, 20)), ((5, 17),))
    for layers in ([0], [1], [0, 1]):
        kept = KeptFeatures(target, layers, tmp_path)([sample], 17)
        expected = features(target, mx.array([sample.tokens]), layers)
        assert mx.array_equal(kept.taps, expected.taps.astype(mx.bfloat16))


def test_processes_that_share_a_folder_do_not_mix_their_files(tmp_path, monkeypatch):
    save = mx.save_safetensors

    def beside(*arguments, **metadata):
        save(*arguments, **metadata)
        monkeypatch.setattr(mx, "save_safetensors", save)
        save_arrays(tmp_path / "two.safetensors", {"a": mx.zeros(2)}, {})

    monkeypatch.setattr(mx, "save_safetensors", beside)
    save_arrays(tmp_path / "one.safetensors", {"a": mx.zeros(1)}, {})
    assert [len(mx.load(str(tmp_path / f"{n}.safetensors"))["a"]) for n in ("one", "two")] == [1, 2]


def test_it_starts_from_a_published_drafter(tmp_path, target, data):
    folder = tinymodels.save_drafter(tmp_path / "warm", seed=3, block_size=4)
    raw = json.loads((folder / "config.json").read_text())
    warm = load_drafter(str(folder))
    before = dict(tree_flatten(warm.parameters()))
    done = train(
        target,
        out=tmp_path / "out",
        recipe=recipe(data, steps=1, learning_rate=1e-9),
        warm=(warm, raw),
    )
    assert done.config == raw
    for name, weight in tree_flatten(done.drafter.parameters()):
        assert mx.allclose(weight, before[name], atol=1e-5), name
    fewer = train(
        target, out=tmp_path / "few", recipe=recipe(data, steps=1, draft_vocab=3), warm=(warm, raw)
    )
    assert fewer.drafter.lm_head.weight.shape == (3, target.hidden_size)
    other = raw | {"hidden_size": 32}
    drafter = new_drafter(DraftConfig.from_dict(other), 0)
    with pytest.raises(IncompatibleDrafterError):
        train(target, out=tmp_path / "other", recipe=recipe(data), warm=(drafter, other))


@pytest.mark.parametrize(
    ("layers", "taps"), [(3, [1, 2]), (6, [1, 3, 5]), (36, [1, 9, 17, 25, 33]), (1, [0])]
)
def test_tapped_layers_are_spread_over_the_target(layers, taps):
    assert tap_layers(layers) == taps


def test_the_mask_is_a_token_that_nothing_has(target):
    end = target.tokenizer.eos_token_id
    everything = set(range(target.vocab_size))
    assert mask_token(target, everything - {7}) == 7 != end
    with pytest.raises(SettingsError, match="every token occurs"):
        mask_token(target, everything)


def test_a_missing_chat_template_is_told_before_anything_is_written(tmp_path, data, target):
    bare = tinymodels.ending_at(target)
    bare.tokenizer.has_chat_template = False
    try:
        with pytest.raises(PromptError, match="no chat template"):
            train(bare, tmp_path / "out", recipe(data))
        assert not (tmp_path / "out").exists()
    finally:
        bare.tokenizer.has_chat_template = True


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path):
    for options in (
        ["--data", tmp_path / "nothing.jsonl"],
        ["--synthesize", "2", "--warm-start", "no/such/drafter"],
    ):
        done = run("train", "--out", tmp_path / "out", "--offline", *options)
        assert done.returncode == 1 and done.stderr.startswith("error: "), done.stderr
        assert done.stderr.count("\n") == 1
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
def test_mistakes_of_usage_are_told_first(tmp_path, options, message, monkeypatch):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded before the options are judged")

    monkeypatch.setattr("dflash_mlx.load_target", load)
    out = tmp_path / "out"
    done = run("train", "--synthesize", "2", "--out", out, *options, COLUMNS="200")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrong", "depth", "said"),
    [
        ({"layers": 4}, None, "lower --layers"),
        ({"block_size": 5000}, None, "block_size"),
        ({}, 30, "another target"),
    ],
)
def test_shapes_are_judged_before_anything_is_answered(tmp_path, target, wrong, depth, said):
    folder = tinymodels.save_drafter(tmp_path / "warm", seed=3, block_size=4)
    warm = None
    if depth is not None:
        raw = json.loads((folder / "config.json").read_text())
        warm = (load_drafter(str(folder)), raw | {"num_target_layers": depth})
    with pytest.raises(DFlashError, match=said):
        train(target, out=tmp_path / "out", recipe=Recipe(synthesize=2, **wrong), warm=warm)
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_told_before_anything_is_answered(tmp_path, target, data, monkeypatch):
    """On a Mac the GPU's working set counts, not all of the memory."""
    out = tmp_path / "out"
    large = recipe(data, anchors=16, tokens=256)
    little = {"max_recommended_working_set_size": 10**6}
    monkeypatch.setattr(mx, "device_info", lambda: little)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(NotEnoughMemoryError, match=r"lower --tokens \(256\), --anchors \(16\)"):
        train(target, out, large)
    assert not out.exists()


def test_answers_are_kept_if_training_lacks_the_memory(tmp_path, target, data, monkeypatch):
    """What a batch needs is known only after answering; smaller batches then reuse the answers."""
    seen = list[Any]()
    large = recipe(data, steps=1, anchors=16, tokens=256)
    train(target, tmp_path / "free", large, listen=seen.append)
    [needed] = [event.memory_bytes for event in seen if isinstance(event, TrainingPlan)]
    monkeypatch.setattr(step_memory, "usable_bytes", lambda: needed - 1)
    out = tmp_path / "out"
    with pytest.raises(NotEnoughMemoryError, match="lower --tokens"):
        train(target, out, large)

    def answer(*_: Any, **__: Any) -> None:
        raise AssertionError("what was answered is answered again")

    monkeypatch.setattr(answer_writer, "complete_prompts", answer)
    train(target, out, replace(large, tokens=64))
    with pytest.raises(SettingsError, match=r"other settings \(tokens\)"):  # there are steps now
        train(target, out, large)
