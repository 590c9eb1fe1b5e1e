"""Invalid drafters and invalid drafts are refused in one line."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
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


class ModuleDrafter(nn.Module):
    """A user's network: `inspect.getattr_static` does not find a tuple that MLX stores."""

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


def test_a_policy_sets_the_block_size_of_a_drafter_without_one():
    policy = DraftPolicy(40)
    drafter = SimpleNamespace(tap_layers=(), start=None)
    assert resolve_block_size(drafter, None, policy) == 40
    assert resolve_block_size(drafter, 5, policy) == 5
    assert resolve_block_size(random_drafter(), None, policy) == random_drafter().block_size


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
def test_an_invalid_draft_is_refused(proposal, message):
    with pytest.raises(ProposalError, match=message):
        generate(target(), Proposes(proposal), PROMPT)


@pytest.mark.parametrize("session", [None, object()], ids=["None", "an object"])
def test_an_invalid_session_is_refused(session, monkeypatch):
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
def test_a_draft_outside_the_vocabulary_is_refused(token, made, parents):
    """Otherwise the target would read beyond its embedding, and a penalty beyond the logits."""
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


def test_a_drafter_of_another_target_is_refused_at_once():
    with pytest.raises(IncompatibleDrafterError, match="hidden_size"):
        stream_generate(target(), random_drafter(hidden_size=128), PROMPT)


def test_max_tokens_is_limited_to_the_context():
    request = make_request(
        target(), drafter=None, prompt=PROMPT, settings=GenerationSettings(max_tokens=10**30)
    )
    assert request.remaining == target().context_length - len(PROMPT)
