"""Steps that are traced and replayed: the same bits as without, few traces, memory in place."""

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

PROMPT = [token % 90 for token in range(60)]
LENGTHS = [1, 1, 16, 4, 1, 16, 4, 16, 1, 1, 4, 16] * 2


def steps_of(model, kv_bits=None, lengths=LENGTHS):
    """Logits and taps of steps that keep half of their rows."""
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
def test_a_replayed_step_has_the_bits_of_the_forward(family, monkeypatch):
    model = family_target(family)
    expected = untraced(monkeypatch, lambda: steps_of(model))
    for _ in range(2):
        results = steps_of(model)
    assert model.steps.why_not is None and model.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_survive_what_happens_between_replayed_steps(family, monkeypatch):
    """Steps without a trace, rewinds, and a session that another one's rows are restored into."""
    one = family_target(family)
    lengths = [1, 16, 16, 1, 4, 1, 16, 4, 1, 1, 40, 1, 4] * 2
    expected = untraced(monkeypatch, lambda: steps_of(one, lengths=lengths))
    session = one.start((0, 1))
    list(session.prefill(PROMPT))
    results = []
    for number, rows in enumerate(lengths):
        proposal = Proposal([(number + row) % 90 for row in range(rows)])
        saved = session.checkpoint()
        session.verify(proposal)
        session.commit([0])
        session.rewind(saved)
        if number % 3 == 0:
            other = one.start((0, 1))
            position = session.position
            other.restore(position, [session.rows(0, position)], session.state(), 1)
            session = other
        with monkeypatch.context() as patched:
            if number % 4 == 1:  # this step runs untraced
                patched.setattr(Traces, "call", lambda *args, **settings: None)
            verified = session.verify(proposal)
        mx.eval(verified)
        results += verified
        session.commit(list(range((rows + 1) // 2)))
    assert one.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_a_replayed_step_writes_quantized_keys(kv_bits, monkeypatch):
    model = target(head_dim=32)
    expected = untraced(monkeypatch, lambda: steps_of(model, kv_bits))
    for _ in range(2):
        results = steps_of(model, kv_bits)
    assert model.steps.why_not is None and model.steps.count >= 3
    assert all(mx.array_equal(*pair).item() for pair in zip(results, expected, strict=True))


def test_each_shape_is_traced_once():
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

    def write():
        texts.append(dm.generate(model, None, PROMPT, max_tokens=30).tokens)

    for _ in range(2):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert texts[1:] == [texts[0]] * 2
    assert model.steps.count == before + 2


def test_a_replayed_step_writes_in_place(monkeypatch):
    """Copies of the caches would raise the peak by more than a row of them."""
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

    more, keys = peak()
    assert model.steps.count == 1
    assert more <= untraced(monkeypatch, peak)[0] + keys // 4


def test_a_long_text_takes_no_more_memory(monkeypatch):
    """Nor while its buffers grow: a copy of the caches would add a third."""
    one = target(num_hidden_layers=4)

    def peak():
        gc.collect()  # what earlier tests have left is not freed meanwhile
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        tokens = dm.generate(one, None, PROMPT, max_tokens=1000).tokens
        return mx.get_peak_memory() - before, tokens

    expected, text = untraced(monkeypatch, peak)
    dm.generate(one, None, PROMPT, max_tokens=1000)
    traces = one.steps.count
    more, tokens = peak()
    assert tokens == text and traces == one.steps.count <= 10
    assert more <= 1.15 * expected


@pytest.mark.parametrize("kept", [1, 4])
def test_a_recurrent_cache_keeps_one_state(kept):
    session = family_target("qwen3_5").start()
    list(session.prefill(PROMPT))
    for _ in range(3):
        mx.eval(session.verify(Proposal([1] * 4)))
        session.commit(list(range(kept)))
    cache = session.cache[0]
    held = [x for _, x in tree_flatten(vars(cache)) if isinstance(x, mx.array)]
    assert len(held) == len([x for x in cache.cache if x is not None])


def test_a_model_that_looks_at_its_position_runs_without_traces(monkeypatch):
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
def test_rotations_of_other_kinds_are_left_to_mlx(settings):
    rope = nn.RoPE(**{"dims": 64} | settings)
    x = mx.random.normal((1, 2, 4, 64))
    offset = mx.array([5])
    ours = RopeTables().rotate(nn.RoPE.__call__, rope, x, offset=offset)
    assert mx.array_equal(ours, rope(x, offset=offset)).item()


def test_the_layers_of_a_traced_step_share_their_rotations():
    """Cosines: one for all layers, whose queries and keys turn alike."""
    one = target(num_hidden_layers=5)
    session = one.start()
    list(session.prefill(PROMPT))
    for _ in range(3):
        logits, _ = session.verify(Proposal([1] * 4))
        graph = io.StringIO()
        mx.export_to_dot(graph, logits)
        mx.eval(logits)
        session.commit([0])
    assert graph.getvalue().count('"Cos"') == 1
