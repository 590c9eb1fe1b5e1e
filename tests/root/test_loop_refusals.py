"""Drafters that are none and settings that cannot be: refused, at once and in one line."""

import re
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from oracle import Oracle, Proposes
from tinymodels import greedy, random_drafter, target, tokenizer

from dflash_mlx.engine.engine import Engine
from dflash_mlx.errors import IncompatibleDrafterError, ProposalError, SettingsError
from dflash_mlx.generation import (
    DEFAULT_BLOCK_SIZE,
    GenerationSettings,
    make_request,
    resolve_block_size,
)
from dflash_mlx.loop import generate, stream_generate
from dflash_mlx.policy.draft_policy import DraftPolicy
from dflash_mlx.proposal import Proposal

PROMPT = tokenizer().encode("what is 37 + 48?")
VOCABULARY = len(tokenizer())


@pytest.mark.parametrize("name", ["drafter", "policy", "conversation"])
@pytest.mark.parametrize("value", [5, "tiny", object(), Oracle])
def test_what_is_no_drafter_policy_or_conversation_is_refused(name, value):
    given = {"drafter": None, "policy": None, "conversation": None} | {name: value}
    with pytest.raises(SettingsError, match=f"^{name} must be None or "):
        stream_generate(target(), given.pop("drafter"), PROMPT, **given)


class ModuleDrafter(nn.Module):
    """A user's network: MLX keeps its tuple out of the sight of `inspect.getattr_static`."""

    def __init__(self):
        super().__init__()
        self.tap_layers = (0, 2)

    def start(self, target, sampler):
        return Proposes(lambda anchor, width: Proposal([anchor]))


def test_an_mlx_module_is_a_drafter_on_every_python():
    drafter = ModuleDrafter()
    assert DraftPolicy.of(target(), drafter).block_size == 16
    result = generate(target(), drafter, PROMPT, max_tokens=4)
    assert result.tokens == generate(target(), None, PROMPT, max_tokens=4).tokens


def test_a_policy_of_what_is_no_pair_is_refused():
    for none in (None, "lookup", Oracle):
        with pytest.raises(SettingsError, match="for a target and its drafter, not "):
            DraftPolicy.of(target(), none)
    with pytest.raises(SettingsError, match="^target must be such as"):
        DraftPolicy.of("tiny", random_drafter())


def test_a_policy_says_how_much_a_drafter_without_a_block_size_drafts():
    policy, drafter = DraftPolicy(40), SimpleNamespace(tap_layers=(), start=None)
    assert resolve_block_size(drafter, None, policy) == 40
    assert resolve_block_size(drafter, 5, policy) == 5
    assert resolve_block_size(random_drafter(), None, policy) == random_drafter().block_size


@pytest.mark.parametrize("size", [0, -1, None, 1.5, True, "8", 1025, 10**400], ids=str)
def test_a_policy_of_no_length_is_refused(size):
    with pytest.raises(SettingsError, match="^block_size must be a whole number from 1 to"):
        DraftPolicy.of(target(), random_drafter(), block_size=size)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (lambda anchor, width: Proposal([anchor + 1, 2]), "not its anchor"),
        (lambda anchor, width: Proposal(mx.array([anchor + 1])), "not its anchor"),
        (lambda anchor, width: Proposal([anchor] * (width + 1)), f"{DEFAULT_BLOCK_SIZE}"),
        (lambda anchor, width: [anchor], "must return a Proposal, not "),
        (lambda anchor, width: None, "must return a Proposal, not None"),
    ],
    ids=["another anchor", "another anchor, as an array", "too many rows", "a list", "None"],
)
def test_what_is_no_draft_is_refused(proposal, message):
    with pytest.raises(ProposalError, match=message):
        generate(target(), Proposes(proposal), PROMPT)


@pytest.mark.parametrize("session", [None, object()], ids=["None", "an object"])
def test_what_is_no_session_is_refused(session, monkeypatch):
    drafter = Proposes(Proposal)
    monkeypatch.setattr(drafter, "start", lambda target, sampler: session)
    with pytest.raises(SettingsError, match="with extend and propose"):
        generate(target(), drafter, PROMPT)


@pytest.mark.parametrize(
    ("token", "made", "parents"),
    [
        (VOCABULARY, list, (-1, 0, 1)),
        (2**30, list, (-1, 0, 1)),
        (-1, mx.array, (-1, 0, 1)),
        (2**30, mx.array, (-1, 0, 1)),
        (10**6, mx.array, (-1, 0, 0)),
    ],
)
def test_a_draft_that_no_vocabulary_has_is_refused(token, made, parents):
    """It would have the target read beyond its embedding, and a penalty beyond the logits."""
    drafter = Proposes(
        lambda anchor, width: Proposal(made([anchor, token, token][:width]), parents[:width])
    )
    for settings in ({}, {"repetition_penalty": 1.2}):
        with pytest.raises(ProposalError, match=f"of {VOCABULARY} has no token {token}"):
            generate(target(), drafter, PROMPT, **settings)
    with Engine(target(), drafter) as engine:
        streams = [engine.submit(PROMPT) for _ in range(2)]
        for stream in streams:
            with pytest.raises(ProposalError, match=f"of {VOCABULARY} has no token {token}"):
                list(stream)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64], ids=str)
def test_an_array_of_any_integers_is_a_draft(dtype):
    class Typed(Oracle):
        def propose(self, anchor, width):
            return Proposal(mx.array(super().propose(anchor, width).tokens, dtype=dtype))

    answer = greedy(target(), PROMPT, 24)
    drafter = Typed(PROMPT, answer, VOCABULARY, 0.8)
    assert generate(target(), drafter, PROMPT, max_tokens=24).tokens == answer


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"top_k": VOCABULARY + 1}, "top_k"),
        ({"tree_budget": 1}, "tree_budget"),
        ({"tree_budget": "many"}, "tree_budget"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "3"}, "block_size"),
        ({"block_size": 10**400}, "block_size must be a whole number from 1 to 2,147,483,647"),
        ({"kv_bits": np.array([8, 4])}, "must be 8 or 4"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": 5}, "stop"),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafter", [None, "network"])
def test_settings_out_of_range_are_refused_at_once(settings, word, drafter):
    drafter = drafter and random_drafter()
    with pytest.raises(SettingsError, match=word) as caught:
        stream_generate(target(), drafter, PROMPT, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_token", "Did you mean max_tokens?"),
        ("repetition_penalti", "Did you mean repetition_penalty?"),
        ("sampler", "help(dflash_mlx.generate)"),
    ],
)
def test_a_mistyped_setting_names_the_one_that_may_be_meant(name, told):
    with Engine(target(), None) as engine:
        for ask in (partial(generate, target(), None), engine.submit):
            with pytest.raises(SettingsError, match=f"no setting {name!r}.*{re.escape(told)}"):
                ask(PROMPT, **{name: 3})


def test_a_block_wider_than_the_drafters_is_refused():
    with pytest.raises(SettingsError, match="17 is more than the 16"):
        stream_generate(target(), random_drafter(), PROMPT, block_size=17)


def test_a_drafter_of_another_target_is_refused_at_once():
    with pytest.raises(IncompatibleDrafterError, match="hidden_size"):
        stream_generate(target(), random_drafter(hidden_size=128), PROMPT)


def test_more_tokens_than_anybody_could_want_are_as_many_as_the_context_has():
    request = make_request(target(), None, PROMPT, GenerationSettings(max_tokens=10**30))
    assert request.remaining == target().context_length - len(PROMPT)
