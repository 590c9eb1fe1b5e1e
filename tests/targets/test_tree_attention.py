"""Draft trees: rows have the logits of their paths; masks, commits, ends of texts, refusals."""

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
    past = [-2, -1]  # the two cached rows before the tree's row 0
    keys = [*past, 0, 1, 2, 3, 4, 5]
    seen = [[key for key, visible in zip(keys, row, strict=True) if visible] for row in mask]
    assert seen == [
        [*past, 0],
        [*past, 0, 1],
        [*past, 0, 2],
        [*past, 0, 1, 3],
        [*past, 0, 2, 4],
        [*past, 0, 2, 5],
    ]


def test_a_window_counts_positions_along_a_path():
    """Row 5 is the third row of its path: a window of 3 shows it the root, but no cached row."""
    mask = Span(SimpleNamespace(position=0), FORK).mask(held=2, window=3).tolist()
    assert mask[5] == [False, False, True, False, True, False, False, True]
    assert mask[1] == [False, True, True, True, False, False, False, False]


def session_after_a_tree(family: str, context: int):
    """A session that has verified a tree after `context` tokens, and not committed."""
    session = truth(family, 1)[0].start()
    list(session.prefill(random_prompt(context, 0)))
    logits, _ = session.verify(FORK)
    mx.eval(logits, [cache.state for cache in session.cache])
    return session


def peak_of_commit(session) -> int:
    """The peak of memory while a path of the tree is committed, in bytes above that before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    session.commit([0, 2, 5])
    mx.eval([cache.state for cache in session.cache])
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss", "deepseek_v3"])
def test_a_commit_copies_no_history(family):
    """Its peak of memory is that of a few rows (and states), whatever the context's length."""
    short = session_after_a_tree(family, 300)
    long = session_after_a_tree(family, 1500)
    arrays = [array for cache in long.cache for _, array in tree_flatten(cache.state)]
    bytes_of_one_layers_keys = min(
        array.nbytes
        for array in arrays
        if isinstance(array, mx.array) and array.ndim == 4 and array.shape[2] > 1000
    )
    short_peak = peak_of_commit(short)
    long_peak = peak_of_commit(long)
    assert long_peak - short_peak < bytes_of_one_layers_keys / 2
    assert long_peak < bytes_of_one_layers_keys


def test_caches_record_a_trees_rows_only_while_it_is_verified():
    """A chain records none, and the record of a tree ends with its commit."""
    target, prompt, _ = truth("qwen3", 1)
    session = target.start()
    list(session.prefill(prompt))
    session.verify(dm.Proposal([1, 2, 3]))
    session.commit([0, 1])
    fields = {"keys", "values", "offset"}
    assert all(set(vars(cache)) == fields for cache in session.cache)
    session.verify(FORK)
    session.commit([0, 2])
    assert all(cache.tree is None and "_new" not in vars(cache) for cache in session.cache)


class TokenizerWithEos(CharacterTokenizer):
    """A CharacterTokenizer with the given end-of-sequence tokens."""

    def __init__(self, *eos: int) -> None:
        self.eos_token_ids = frozenset(eos)


@pytest.mark.parametrize("least", [30, 31, 32, 33])  # at least one end is inside a tree's path
@pytest.mark.parametrize("end", ["eos", "stop", "length"])
def test_a_text_that_ends_inside_an_accepted_path_is_the_plain_one(end, least):
    target, prompt, answer = truth("qwen3", 1)
    # The text ends at the first token from `least` on that did not occur before.
    place = next(i for i in range(least, len(answer)) if answer[i] not in answer[:i])
    settings = {"max_tokens": 97}
    if end == "eos":
        target = Target(
            target.model, TokenizerWithEos(answer[place]), {"model_type": "qwen3"}, "ending"
        )
    elif end == "stop":
        settings["stop"] = chr(0x4E00 + answer[place])  # a CharacterTokenizer's text of the token
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


def target_without_trees() -> Target:
    """A target whose rotations depend on the number of rows, which no tree of rows allows."""
    model = random_model("qwen3")
    for layer in model.layers:
        layer.self_attn.rope = DynamicNTKScalingRoPE(32, 2048, False, 10000.0, 2.0)
    return target_of(model, "qwen3")


def test_a_tree_is_refused_where_rotations_are_of_an_unknown_kind():
    target = target_without_trees()
    assert not target.supports_trees
    with pytest.raises(UnsupportedTreeError, match="DynamicNTKScalingRoPE.*draft chains") as caught:
        target.start().verify(FORK)
    assert "\n" not in str(caught.value)
    target.start().verify(dm.Proposal([1, 2, 3]))


def test_a_tree_budget_is_refused_before_any_work():
    """A policy would draft chains for such a target, but an explicit budget is an error."""
    drafter = SimpleNamespace(tap_layers=(), drafts_trees=True, start=print)
    with pytest.raises(UnsupportedTreeError):
        dm.stream_generate(target_without_trees(), drafter, [1, 2], tree_budget=16)


def test_a_tree_is_refused_where_a_model_makes_its_own_masks(monkeypatch):
    """Such a model would show the rows of one branch to another branch."""
    model = random_model("qwen3")
    target = target_of(model, "qwen3")
    path = "mlx_lm.models.qwen3.create_attention_mask"
    monkeypatch.setattr(path, lambda h, cache: "causal")
    with pytest.raises(UnsupportedTreeError, match="masks of its own"):
        target.start().verify(FORK)


def largest_tree_error(target: dm.Target, seed: int) -> float:
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
    """One seed's prompt is longer than the window; the other's text outgrows it on the way."""
    target, _, _ = truth(family, seed)
    assert largest_tree_error(target, seed) <= 5e-5
