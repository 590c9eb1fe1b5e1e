"""Invalid drafters and invalid drafts are refused in one line."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from oracle import FunctionDrafter, Oracle
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
    """A user's network. MLX keeps its tuple where `inspect.getattr_static` does not find it."""

    def __init__(self):
        super().__init__()
        self.tap_layers = (0, 2)

    def start(self, target, sampler):
        return FunctionDrafter(lambda anchor, width: Proposal([anchor]))


def test_an_mlx_module_is_a_drafter_on_every_python():
    """Protocols are checked with `inspect.getattr_static` since Python 3.12."""
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
        generate(target(), FunctionDrafter(proposal), PROMPT)


@pytest.mark.parametrize("session", [None, object()], ids=["None", "an object"])
def test_an_invalid_session_is_refused(session, monkeypatch):
    drafter = FunctionDrafter(Proposal)
    monkeypatch.setattr(drafter, "start", lambda target, sampler: session)
    with pytest.raises(SettingsError, match="with extend and propose"):
        generate(target(), drafter, PROMPT)


CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0)


@pytest.mark.parametrize(
    ("token", "make_tokens", "parents"),
    [
        (VOCABULARY, list, CHAIN),
        (2**30, list, CHAIN),
        (-1, mx.array, CHAIN),
        (2**30, mx.array, CHAIN),
        (10**6, mx.array, TREE),
    ],
)
def test_a_draft_outside_the_vocabulary_is_refused(token, make_tokens, parents):
    """Without the check the target would read beyond its embedding, a penalty beyond the logits."""

    def propose(anchor, width):
        tokens = [anchor, token, token]
        return Proposal(make_tokens(tokens[:width]), parents[:width])

    drafter = FunctionDrafter(propose)
    message = f"of {VOCABULARY} has no token {token}"
    for settings in ({}, {"repetition_penalty": 1.2}):
        with pytest.raises(ProposalError, match=message):
            generate(target(), drafter, PROMPT, **settings)
    with Engine(target(), drafter) as engine:
        streams = [engine.submit(PROMPT) for _ in range(2)]
        for stream in streams:
            with pytest.raises(ProposalError, match=message):
                list(stream)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64], ids=str)
def test_a_draft_may_be_an_array_of_any_integer_type(dtype):
    class ArrayOracle(Oracle):
        def propose(self, anchor, width):
            tokens = super().propose(anchor, width).tokens
            return Proposal(mx.array(tokens, dtype=dtype))

    answer = greedy(target(), PROMPT, 24)
    drafter = ArrayOracle(PROMPT, answer=answer, vocab_size=VOCABULARY, p=0.8)
    assert generate(target(), drafter, PROMPT, max_tokens=24).tokens == answer


def test_a_drafter_of_another_target_is_refused_at_once():
    with pytest.raises(IncompatibleDrafterError, match="hidden_size"):
        stream_generate(target(), random_drafter(hidden_size=128), PROMPT)


def test_max_tokens_is_limited_to_the_context():
    settings = GenerationSettings(max_tokens=10**30)
    request = make_request(target(), drafter=None, prompt=PROMPT, settings=settings)
    assert request.remaining == target().context_length - len(PROMPT)
