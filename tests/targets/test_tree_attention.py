"""Draft trees: a tree is its separate paths on every family; masks, commits, ends, refusals."""

from random import Random
from types import SimpleNamespace

import mlx.core as mx
import pytest
from families import (
    FAMILIES,
    PROMPTS,
    CharacterTokenizer,
    random_model,
    random_prompt,
    target_of,
    truth,
)
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from oracle import random_tree, separate_paths
from request_set import TextOracle

import dflash_mlx as dm
from dflash_mlx.errors import UnsupportedTreeError
from dflash_mlx.targets import Target
from dflash_mlx.targets.span import Span

#     0
#    / \
#   1   2
#   |  / \
#   3 4   5
FORK = dm.Proposal([7, 8, 9, 10, 11, 12], (-1, 0, 0, 1, 2, 2))


def test_a_row_sees_the_past_and_its_ancestors():
    mask = Span(SimpleNamespace(position=0), FORK).mask(held=2, window=None).tolist()
    seen = [[column - 2 for column, visible in enumerate(row) if visible] for row in mask]
    past = [-2, -1]
    assert seen == [
        [*past, 0],
        [*past, 0, 1],
        [*past, 0, 2],
        [*past, 0, 1, 3],
        [*past, 0, 2, 4],
        [*past, 0, 2, 5],
    ]


def test_a_window_counts_positions():
    """Row 5 is the third of its path: with a window of 3 it still sees the root, but no past."""
    mask = Span(SimpleNamespace(position=0), FORK).mask(held=2, window=3).tolist()
    assert mask[5] == [False, False, True, False, True, False, False, True]
    assert mask[1] == [False, True, True, True, False, False, False, False]


def after_a_tree(family: str, context: int):
    """A session that has read a tree after that many tokens."""
    session = truth(family, 1)[0].start()
    list(session.prefill(random_prompt(context, 0)))
    logits, _ = session.verify(FORK)
    mx.eval(logits, [cache.state for cache in session.cache])
    return session


def peak_of_commit(session) -> int:
    """Bytes in use at most while a path of the tree is committed, above those before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    session.commit([0, 2, 5])
    mx.eval([cache.state for cache in session.cache])
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss", "deepseek_v3"])
def test_a_commit_copies_no_history(family):
    """The memory it takes for a moment is that of a few rows (and states), at any length."""
    short = after_a_tree(family, 300)
    long = after_a_tree(family, 1500)
    history = min(
        array.nbytes
        for cache in long.cache
        for _, array in tree_flatten(cache.state)
        if isinstance(array, mx.array) and array.ndim == 4 and array.shape[2] > 1000
    )
    peaks = peak_of_commit(short), peak_of_commit(long)
    assert peaks[1] - peaks[0] < history / 2, "a copy of one layer's keys would be more"
    assert peaks[1] < history


def test_a_chain_records_nothing_for_trees():
    target, prompt, _ = truth("qwen3", 1)
    session = target.start()
    list(session.prefill(prompt))
    session.verify(dm.Proposal([1, 2, 3]))
    session.commit([0, 1])
    fields = {"keys", "values", "offset"}
    assert all(set(vars(cache)) == fields for cache in session.cache), "nothing is recorded"
    session.verify(FORK)
    session.commit([0, 2])
    assert all(cache.tree is None and "_new" not in vars(cache) for cache in session.cache)


class Ending(CharacterTokenizer):
    """A CharacterTokenizer with these tokens as ends of the text."""

    def __init__(self, *eos: int) -> None:
        self.eos_token_ids = frozenset(eos)


@pytest.mark.parametrize("least", [30, 31, 32, 33])  # one of them is inside a path
@pytest.mark.parametrize("end", ["eos", "stop", "length"])
def test_a_text_ends_inside_a_path(end, least):
    target, prompt, answer = truth("qwen3", 1)
    place = next(i for i in range(least, len(answer)) if answer[i] not in answer[:i])
    settings = {"max_tokens": 97}
    if end == "eos":
        target = Target(target.model, Ending(answer[place]), {"model_type": "qwen3"}, "ending")
    elif end == "stop":
        settings["stop"] = chr(0x4E00 + answer[place])
    else:
        settings["max_tokens"] = place + 1
    plain = dm.generate(target, None, prompt, **settings)
    oracle = TextOracle([[*prompt, *answer]], 256, 1.0)
    oracle.branches = True
    drafted = dm.generate(target, oracle, prompt, block_size=24, **settings)
    assert (drafted.text, drafted.tokens) == (plain.text, plain.tokens)
    assert drafted.finish_reason == plain.finish_reason == ("length" if end == "length" else "stop")
    assert len(drafted.tokens) == place + 1
    assert drafted.stats.rounds < (place + 1) / 2


def without_trees() -> Target:
    """A target whose rotations depend on how many rows there are."""
    model = random_model("qwen3")
    for layer in model.layers:
        layer.self_attn.rope = DynamicNTKScalingRoPE(32, 2048, False, 10000.0, 2.0)
    return target_of(model, "qwen3")


def test_positions_of_an_unknown_kind_are_refused():
    target = without_trees()
    assert not target.supports_trees
    with pytest.raises(UnsupportedTreeError, match="DynamicNTKScalingRoPE.*draft chains") as caught:
        target.start().verify(FORK)
    assert "\n" not in str(caught.value)
    target.start().verify(dm.Proposal([1, 2, 3]))


def test_a_budget_is_refused_before_any_work():
    """A policy drafts chains for such a target, but a budget that was asked for is refused."""
    drafter = SimpleNamespace(tap_layers=(), drafts_trees=True, start=print)
    with pytest.raises(UnsupportedTreeError):
        dm.stream_generate(without_trees(), drafter, [1, 2], tree_budget=16)


def test_a_model_that_masks_by_itself_is_refused(monkeypatch):
    """It would show every branch to every other."""
    model = random_model("qwen3")
    target = target_of(model, "qwen3")
    path = "mlx_lm.models.qwen3.create_attention_mask"
    monkeypatch.setattr(path, lambda h, cache: "causal")
    with pytest.raises(UnsupportedTreeError, match="masks of its own"):
        target.start().verify(FORK)


LIMIT = 5e-5


def largest_error(target: dm.Target, seed: int) -> float:
    """The largest error in logits of random trees, with paths and chains committed in between."""
    rng = Random(seed)
    text = random_prompt(PROMPTS[seed], 9)
    session = target.start()
    list(session.prefill(text))
    errors = []
    for _ in range(4):
        tree = random_tree(rng, rng.choice((3, 9, 16)))
        expected = separate_paths(target, text, tree)
        logits, _ = session.verify(tree)
        errors.append(mx.abs(logits - expected).max().item())
        path = [0, *rng.choice(tree.paths())]
        session.commit(path)
        chain = random_prompt(rng.choice((1, 5)), rng.randrange(99))
        session.verify(dm.Proposal(chain))
        session.commit([0])
        text += [*(tree.tokens[row] for row in path), chain[0]]
        assert session.position == len(text)
    return max(errors)


@pytest.mark.by_family
@pytest.mark.parametrize("seed", PROMPTS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v41"])
def test_a_trees_logits_are_those_of_its_separate_paths(family, seed):
    """Hybrids included; one prompt starts beyond the window, the other wraps it on the way."""
    assert largest_error(truth(family, seed)[0], seed) <= LIMIT
