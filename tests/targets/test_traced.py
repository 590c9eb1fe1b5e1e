"""Traced and replayed steps: the same bits as untraced ones, few traces, no copies of caches."""

import gc
import io
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family_target
from mlx.utils import tree_flatten
from tinymodels import target

import dflash_mlx as dm
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target
from dflash_mlx.targets.rope_tables import RopeTables
from dflash_mlx.targets.traced import attended_keys
from dflash_mlx.traces import Traces

PROMPT = list(range(60))
# The rows of each step; each count repeats, so that its later steps are replayed.
LENGTHS = [1, 1, 16, 4, 1, 16, 4, 16, 1, 1, 4, 16] * 2


def steps_of(model, kv_bits=None, lengths=LENGTHS):
    """Logits and taps of steps with `lengths` rows, of which half are committed."""
    session = model.start((0, 1), kv_bits)
    list(session.prefill(PROMPT))
    results = []
    for number, rows in enumerate(lengths):
        verified = session.verify(Proposal([(number + row) % 90 for row in range(rows)]))
        mx.eval(verified)
        results += verified
        session.commit(list(range((rows + 1) // 2)))
    return results


def untraced(monkeypatch, call):
    """The result of a call in which no step is traced or replayed."""
    with monkeypatch.context() as patched:
        patched.setattr(Traces, "call", lambda *args, **settings: None)
        return call()


WINDOWS = ("gpt_oss", "gemma4_dense", "gemma4_E4B-like")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "lfm2_moe", "deepseek_v3", *WINDOWS])
def test_a_replayed_step_has_the_bits_of_an_untraced_forward(family, monkeypatch):
    model = family_target(family)
    expected = untraced(monkeypatch, lambda: steps_of(model))
    for _ in range(2):
        results = steps_of(model)
    assert model.steps.why_not is None and model.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_survive_what_happens_between_replayed_steps(family, monkeypatch):
    """Untraced steps, rewinds, and moving to a new session by restoring the rows there."""
    model = family_target(family)
    lengths = [1, 16, 16, 1, 4, 1, 16, 4, 1, 1, 40, 1, 4] * 2
    expected = untraced(monkeypatch, lambda: steps_of(model, lengths=lengths))
    session = model.start((0, 1))
    list(session.prefill(PROMPT))
    results = []
    for number, rows in enumerate(lengths):
        proposal = Proposal([(number + row) % 90 for row in range(rows)])
        saved = session.checkpoint()
        session.verify(proposal)
        session.commit([0])
        session.rewind(saved)
        if number % 3 == 0:
            restored = model.start((0, 1))
            position = session.position
            restored.restore(position, [session.rows(0, position)], session.state(), 1)
            session = restored
        with monkeypatch.context() as patched:
            if number % 4 == 1:  # this step runs untraced
                patched.setattr(Traces, "call", lambda *args, **settings: None)
            verified = session.verify(proposal)
        mx.eval(verified)
        results += verified
        session.commit(list(range((rows + 1) // 2)))
    assert model.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_a_replayed_step_with_quantized_keys_has_the_bits_of_an_untraced_one(kv_bits, monkeypatch):
    model = target(head_dim=32)
    expected = untraced(monkeypatch, lambda: steps_of(model, kv_bits))
    for _ in range(2):
        results = steps_of(model, kv_bits)
    assert model.steps.why_not is None and model.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


def test_each_shape_is_traced_once():
    """A step's shape depends on the rounded number of keys that it attends to."""
    model = target(num_hidden_layers=2)
    dm.generate(model, None, PROMPT, max_tokens=400)
    shapes = {attended_keys(len(PROMPT) + n) for n in range(1, 400)}
    assert model.steps.count == len(shapes)
    dm.generate(model, None, PROMPT, max_tokens=400)
    assert model.steps.count == len(shapes)


def test_every_thread_traces_for_itself():
    model = target()
    dm.generate(model, None, PROMPT, max_tokens=30)
    before = model.steps.count
    texts = [dm.generate(model, None, PROMPT, max_tokens=30).tokens]

    def generate():
        texts.append(dm.generate(model, None, PROMPT, max_tokens=30).tokens)

    for _ in range(2):
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    assert texts[1:] == [texts[0]] * 2
    assert model.steps.count == before + 2


def test_a_replayed_step_writes_in_place(monkeypatch):
    """The peak is an untraced step's: a copy of one layer's keys would raise it by far more."""
    model = target(num_hidden_layers=4)

    def peak():
        session = model.start()
        list(session.prefill(PROMPT * 15))
        for _ in range(4):
            mx.eval(session.verify(Proposal([1] * 4)))
            session.commit([0, 1])
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(session.verify(Proposal([1] * 4)))
        return mx.get_peak_memory() - before, session.cache[0].keys.nbytes

    replayed_peak, bytes_of_keys = peak()
    assert model.steps.count == 1
    untraced_peak, _ = untraced(monkeypatch, peak)
    assert replayed_peak <= untraced_peak + bytes_of_keys // 4


def test_a_long_text_takes_no_more_memory_with_traces(monkeypatch):
    """Also while the caches' buffers grow: a copy of the caches would add a third to the peak."""
    model = target(num_hidden_layers=4)

    def peak():
        gc.collect()  # so that nothing of earlier tests is freed during the measurement
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        tokens = dm.generate(model, None, PROMPT, max_tokens=1000).tokens
        return mx.get_peak_memory() - before, tokens

    untraced_peak, untraced_tokens = untraced(monkeypatch, peak)
    dm.generate(model, None, PROMPT, max_tokens=1000)
    traces = model.steps.count
    traced_peak, traced_tokens = peak()
    assert traced_tokens == untraced_tokens
    assert model.steps.count == traces <= 10
    assert traced_peak <= 1.15 * untraced_peak


@pytest.mark.parametrize("kept", [1, 4])
def test_a_recurrent_cache_holds_one_state_after_a_commit(kept):
    """It holds no other arrays: neither the states before the step nor its recorded inputs."""
    session = family_target("qwen3_5").start()
    list(session.prefill(PROMPT))
    for _ in range(3):
        mx.eval(session.verify(Proposal([1] * 4)))
        session.commit(list(range(kept)))
    cache = session.cache[0]
    arrays = [leaf for _, leaf in tree_flatten(vars(cache)) if isinstance(leaf, mx.array)]
    assert len(arrays) == len([part for part in cache.cache if part is not None])


def test_a_model_that_evaluates_its_position_runs_without_traces(monkeypatch):
    """An array cannot be evaluated while a step is traced; the target notices and runs untraced."""
    model = target(num_hidden_layers=5)
    expected = steps_of(model)
    assert model.steps.count
    model = Target(model.model, model.tokenizer, model.config, model.name)
    attention = type(model.model.model.layers[0].self_attn)
    original = attention.__call__

    def call(self, x, mask=None, cache=None):
        int(cache.offset)
        return original(self, x, mask, cache)

    monkeypatch.setattr(attention, "__call__", call)
    results = steps_of(model)
    assert "eval" in model.steps.why_not
    assert not model.steps._of_thread.functions
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("settings", [{}, {"base": 1e6}, {"scale": 0.25}])
def test_shared_rotations_have_the_bits_of_mlx(rows, settings):
    rope = nn.RoPE(64, **settings)
    rotations = RopeTables()
    for position in (1, 37, 1000, 40_000):
        offset = mx.array([position])
        for heads in (2, 6):
            x = mx.random.normal((1, heads, rows, 64))
            ours = rotations.rotate(nn.RoPE.__call__, rope, x, offset=offset)
            assert mx.array_equal(ours, rope(x, offset=offset)).item()


@pytest.mark.parametrize("settings", [{"traditional": True}, {"dims": 32}])
def test_other_kinds_of_rotations_are_left_to_mlx(settings):
    rope = nn.RoPE(**{"dims": 64} | settings)
    x = mx.random.normal((1, 2, 4, 64))
    offset = mx.array([5])
    ours = RopeTables().rotate(nn.RoPE.__call__, rope, x, offset=offset)
    assert mx.array_equal(ours, rope(x, offset=offset)).item()


def test_the_layers_of_a_traced_step_share_their_rotations():
    """The graph of a step has one cosine for the queries and keys of all five layers."""
    session = target(num_hidden_layers=5).start()
    list(session.prefill(PROMPT))
    for _ in range(3):
        logits, _ = session.verify(Proposal([1] * 4))
        graph = io.StringIO()
        mx.export_to_dot(graph, logits)
        mx.eval(logits)
        session.commit([0])
    assert graph.getvalue().count('"Cos"') == 1
