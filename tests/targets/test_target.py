"""The target: its sizes, its prefill, and caches that hold the kept tokens only."""

import copy
import sys

import mlx.core as mx
import pytest
from batches import SharedVerifier
from families import family_target, target_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from tinymodels import (
    SUPPORTED,
    target,
    tokenizer,
)

from dflash_mlx.errors import SettingsError
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets.rows import Rows
from dflash_mlx.targets.session import LAST_STEP, longest_step
from dflash_mlx.targets.span import Span

VOCABULARY = len(tokenizer())
STEP = longest_step()
# MLX's CPU products on Linux compute each row independently of the others, so results are compared
# bit for bit there. Elsewhere kernels depend on the number of rows.
EXACT = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)
TOKENS = mx.array([[5, 9, 2, 40, 41, 7, 7, 100]])


def same(a: mx.array, b: mx.array) -> bool:
    if EXACT:
        return bool(mx.array_equal(a, b))
    return a.shape == b.shape and bool(mx.allclose(a, b, rtol=1e-4, atol=1e-4))


def test_a_target_has_the_sizes_of_its_config():
    model = target("qwen3", max_position_embeddings=77)
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (3, 64, VOCABULARY)
    assert model.context_length == 77


@pytest.mark.parametrize("layers", [(3,), (-2,), (0, 99)])
def test_a_layer_that_the_target_lacks_cannot_be_tapped(layers):
    with pytest.raises(SettingsError, match=f"Layer {layers[-1]} .* has 3"):
        target().start(layers)


def test_a_forward_refuses_rows_it_cannot_read_and_changes_no_session():
    """Mixed tap layers, one session twice, or a session whose last forward was not committed."""
    model = target("qwen3")
    sessions = [model.start((0,)), model.start((0,)), model.start((1,))]
    for session in sessions:
        session.read([5, 9, 2], last=True)
    first, second, tapping_another_layer = (Span(session, Proposal([7])) for session in sessions)
    with pytest.raises(SettingsError, match=r"layers \(0,\) and \(1,\)"):
        model.forward(Rows([first, tapping_another_layer]))
    with pytest.raises(SettingsError, match="twice"):
        model.forward(Rows([first, Span(sessions[0], Proposal([8]))]))
    model.forward(Rows([first]))
    with pytest.raises(SettingsError, match="was not committed"):
        model.forward(Rows([first]))
    with pytest.raises(SettingsError, match="was not committed"):
        sessions[0].read([8], last=True)
    sessions[0].commit([0])
    logits, _ = sessions[0].read([8], last=True)
    model.forward(Rows([second]))
    sessions[1].commit([0])
    assert mx.array_equal(sessions[1].read([8], last=True)[0], logits)


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("bits", [None, 8, 4])
@given(data=st.data())
@settings(max_examples=6)
def test_caches_hold_the_kept_tokens_only(family, bits, data):
    """After every commit the caches are those of a model that read the kept tokens only."""
    model = target(family, bits)
    token = st.integers(0, VOCABULARY - 1)
    text = data.draw(st.lists(token, max_size=12), label="prompt")
    session = model.start((0, 2))
    taps = [features for _, features in session.prefill(text)]
    for _ in range(4):
        tokens = data.draw(st.lists(token, min_size=1, max_size=16), label="proposal")
        kept = data.draw(st.integers(1, len(tokens)), label="kept")
        logits, features = session.verify(Proposal(tokens))
        session.commit(range(kept))
        text += tokens[:kept]
        taps.append(features[:, :kept])

        truth = make_prompt_cache(model.model)
        expected = model.model(mx.array([text]), cache=truth)
        assert session.position == len(text)
        for ours, theirs in zip(session.cache, truth, strict=True):
            assert ours.offset == theirs.offset == len(text)
            for held, wanted in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
                assert same(held, wanted)
        assert same(logits[:kept], expected[0, -kept:])
    _, wanted = model.features(mx.array([text]), (0, 2))
    assert same(mx.concatenate(taps, axis=1), wanted)


@pytest.mark.parametrize(
    "length", [5, LAST_STEP, LAST_STEP + 1, STEP + LAST_STEP, STEP + 2 * LAST_STEP]
)
def test_prefill_in_chunks_gives_the_results_of_one_forward(length):
    """Steps of `STEP` tokens and a last one of up to `LAST_STEP`, which alone gives logits."""
    model = target("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    text = [(i * i + 3) % VOCABULARY for i in range(length)]
    session = model.start((0,))
    read, chunks = zip(*session.prefill(text), strict=True)
    body = max(0, length - LAST_STEP)
    steps = [min(STEP, body - start) for start in range(0, body, STEP)]
    assert [taps.shape[1] for taps in chunks] == [*steps, length - body]
    assert set(read[:-1]) <= {None}
    assert session.position == length
    logits, taps = model.features(mx.array([[*text, 9]]), (0,))
    assert mx.allclose(mx.concatenate(chunks, axis=1), taps[:, :-1], atol=1e-4)
    assert mx.allclose(read[-1], logits[:, -2], atol=1e-4)
    following, _ = session.verify(Proposal([9]))
    assert mx.allclose(following[0], logits[0, -1], atol=1e-4)


def test_prefill_computes_the_logits_of_one_row_only():
    """The logits of all 400 rows would take 400 x 32,768 x 4 bytes = 52 MB; it uses under 10 MB."""
    model = target("llama", vocab_size=32768, hidden_size=32, num_hidden_layers=1)
    text = list(range(400))
    session = model.start((0,))

    def peak(work) -> int:
        mx.eval(model.model.parameters())
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        work()
        return mx.get_peak_memory() - before

    assert peak(lambda: list(session.prefill(text))) < 10e6
    assert peak(lambda: mx.eval(model.model(mx.array([text])))) > 50e6  # the control


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [([5, 6, 7], 2), (mx.array([5, 6, 7]), 2), ([5], 2), (mx.array([5]), 0)],
    ids=["lookup's", "a network's", "plain", "pipelined"],
)
def test_a_gpu_starts_while_python_builds(rows, pieces, monkeypatch):
    """A forward of 12 layers is dispatched in pieces of four while Python builds the rest.

    The last piece runs when the step waits for it, so two pieces are dispatched early. A pipelined
    step's row is the token of a step that still runs, so none of its pieces are.
    """
    model = target(num_hidden_layers=12)
    model.steps.why_not = "this test is about forwards that are not traced"
    results = []
    started = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: started.append(arrays))
    for dispatches_early in (True, False):
        monkeypatch.setattr(model, "dispatches_early", dispatches_early)
        expected = pieces if dispatches_early else 0
        session = model.start((3, 11))
        list(session.prefill([1, 2, 3]))
        results.append(session.verify(Proposal(rows)))
        assert len(started) == expected
        session.commit([0])
        batch = [session, model.start((3, 11))]
        verifier = SharedVerifier(model)
        started.clear()
        pipelined_tokens = None if pieces else mx.array([7, 8])
        results[-1] += verifier.verify(batch, [Proposal([1])] * 2, pipelined_tokens)
        assert len(started) == expected
        started.clear()
    for in_pieces_result, whole_result in zip(*results, strict=True):
        assert mx.array_equal(in_pieces_result, whole_result)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_target_of_a_copied_model_reads_the_copys_weights(family):
    """A quantizer or a trainer copies a model, then changes the copy's weights."""
    original = family_target(family)
    model = copy.deepcopy(original.model)
    model.update(tree_map(lambda w: 1.5 * w if w.ndim > 1 else w, model.parameters()))
    session = target_of(model, family).start()
    list(session.prefill([5, 9, 2]))
    logits, _ = session.verify(Proposal([7, 1, 4]))
    expected = model(mx.array([[5, 9, 2, 7, 1, 4]]))[0, 3:]
    assert mx.allclose(logits, expected, atol=1e-3, rtol=1e-3)
    assert not mx.allclose(original.model(mx.array([[5, 9, 2]])), model(mx.array([[5, 9, 2]])))


def test_a_target_of_a_model_with_a_replaced_layer_taps_it_and_reads_trees():
    """A second target prepares the new layer as the first target prepared the old ones."""
    model = family_target("qwen3").model
    model.model.layers[2] = family_target("qwen3", seed=1).model.model.layers[2]
    changed = target_of(model, "qwen3")
    verified = []
    for proposal in (Proposal([5, 6, 7, 8], (-1, 0, 0, 2)), Proposal([5, 7, 8])):
        session = changed.start((2,))
        list(session.prefill([1, 2, 3]))
        verified.append(session.verify(proposal))
    (tree_logits, tree_taps), (logits, taps) = verified
    path = mx.array([0, 2, 3])
    assert mx.allclose(tree_logits[path], logits, atol=1e-4)
    assert mx.allclose(tree_taps[:, path], taps, atol=1e-4)
    assert taps.shape == (1, 3, changed.hidden_size)
