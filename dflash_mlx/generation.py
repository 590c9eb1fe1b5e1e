"""The settings of a generation, checked in one place, and the request that they start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal

from .conversation import Conversation
from .drafter.protocol import Drafter, check_pair, drafts_trees
from .drafter.protocol import block_size as drafter_block_size
from .errors import SettingsError
from .events import Stats
from .policy.draft_policy import DraftPolicy
from .policy.planner import AdaptivePlanner, Planner
from .prefix.cache import PrefixCache
from .prompt import Prompt, branch_points, encode_prompt, thinking_variables
from .request import Request
from .sampling import Sampler
from .settings import SamplingSettings
from .stream import TextStream, skip_text_start
from .targets import Target
from .validation import brief, check_integer, check_type, is_integer

DEFAULT_BLOCK_SIZE = 16
LARGEST_TREE = 1024  # rows; a verify's mask has a place for every pair of them


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplingSettings):
    """Everything a caller can set for one generation, beside the sampling settings.

    Raises `SettingsError` for a value out of range or of a wrong type; `make_request` checks what
    belongs to the pair or to a `Conversation`.

    Attributes:
        max_tokens: the most tokens to generate, an EOS token included; the context limits it too.
        block_size: the most rows verified per step, the last committed token included. None is the
            drafter's own, or the policy's choice.
        policy: chooses the draft length of each step, unless `block_size` is given, and learns for
            later requests. None drafts whole blocks.
        tree_budget: the most rows of a draft tree per step, its root included; `block_size` then
            limits the depth. "auto" lets the policy choose between trees and chains. None drafts
            chains, unless the policy drafts trees.
        kv_bits: 8 or 4 quantizes the target's keys and values; None does not.
        stop: strings that end the text; they are not part of it.
        stop_applies: (token, text) -> whether stop strings count in the text that a token adds, or
            in how many of its last characters; in a thought in none. Called once per token; None is
            everywhere.
        continues: whether the text continues the prompt, so that a leading space is kept.
        conversation: keeps the caches for the next request, which then reads only its new tokens.
        prefix: a `PrefixStore` of the pair, shared by many requests. A conversation has its own.
        think: whether a chat's answer begins with thoughts; None leaves it to the chat template.
        reasoning_effort: "low", "medium" or "high", where the chat template knows it.
        chat_template_kwargs: further variables of the chat template.
        salt: only requests with the same salt share cache entries of the prefix store.
        branches: positions in a prompt of token ids where other prompts are likely to diverge, for
            the prefix store; None finds those of chat messages.
    """

    max_tokens: int = 256
    block_size: int | None = None
    policy: DraftPolicy | None = None
    tree_budget: int | Literal["auto"] | None = None
    kv_bits: int | None = None
    stop: str | Sequence[str] | None = None
    stop_applies: Callable[[int, str], int] | None = None
    continues: bool = False
    conversation: Conversation | None = None
    prefix: PrefixCache | None = None
    salt: str = ""
    branches: Sequence[int] | None = None
    think: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("max_tokens", 0, math.inf, "a whole number, 0 or more", Integral)
        check_type("policy", self.policy, DraftPolicy, "dm.DraftPolicy.of(target, drafter)")
        check_type("conversation", self.conversation, Conversation, "dm.Conversation(...)")
        check_type(
            "prefix", self.prefix, PrefixCache, "dm.PrefixStore(target, drafter, memory=...)"
        )
        if self.stop is not None:
            object.__setattr__(self, "stop", _stop_strings(self.stop))
        if not isinstance(self.continues, bool):
            raise SettingsError(f"continues must be True or False, not {brief(self.continues)}.")
        if self.stop_applies is not None and not callable(self.stop_applies):
            raise SettingsError(f"stop_applies must be a function, not {brief(self.stop_applies)}.")
        variables = self.chat_template_kwargs
        if variables is not None and not isinstance(variables, Mapping):
            raise SettingsError(f"chat_template_kwargs must be a dict, not {brief(variables)}.")
        if self.conversation is not None and (self.prefix is not None or self.salt):
            name = "salt" if self.prefix is None else "prefix"
            raise SettingsError(f"{name}: give it to the Conversation, when that is made.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> GenerationSettings:
        """Settings by name. Raises `SettingsError` for an unknown name too."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]}?" if near else "See help(dflash_mlx.generate)."
                raise SettingsError(f"There is no setting {name!r}. {hint}")
        return cls(**settings)


def make_request(
    target: Target, drafter: Drafter | None, prompt: Prompt, settings: GenerationSettings
) -> Request:
    """Check a request and make its state; no forward runs and no cache is filled yet.

    Args:
        target, drafter, prompt: as in `stream_generate`.
        settings: of this request.

    Raises what `stream_generate` raises at once.
    """
    check_pair(target, drafter)
    block_size = resolve_block_size(drafter, settings.block_size, settings.policy)
    settings.check_vocabulary(target.vocab_size)
    template = dict(settings.chat_template_kwargs or {})
    if settings.think is not None or settings.reasoning_effort is not None:
        wanted = settings.think, settings.reasoning_effort
        template |= thinking_variables(target.tokenizer, *wanted)
    ids = encode_prompt(target, prompt, template)
    kv_bits, conversation = settings.kv_bits, settings.conversation
    if conversation is None:
        prefix, salt = settings.prefix, settings.salt
        conversation = Conversation(target, drafter, kv_bits, prefix=prefix, salt=salt)
    else:
        conversation.check(target, drafter, kv_bits)
    planner = make_planner(target, drafter, settings)
    sampler = Sampler(settings, ids, planner.sharpness)
    tokenizer = target.tokenizer
    detokenizer = tokenizer.detokenizer
    if settings.continues:
        skip_text_start(detokenizer, tokenizer)
    max_tokens = min(settings.max_tokens, target.context_length - len(ids))
    text = TextStream(
        detokenizer,
        tokenizer.eos_token_ids,
        settings.stop or (),
        max_tokens,
        settings.stop_applies,
    )
    stats = Stats(prompt_tokens=len(ids), block_size=block_size, seed=sampler.seed)
    branches = settings.branches
    if branches is None and conversation.prefix is not None:
        branches = branch_points(target, prompt, ids, template)
    request = Request(conversation, ids, sampler, planner, text, stats, branches or ())
    conversation.open(request)
    return request


def make_planner(target: Target, drafter: Drafter | None, settings: GenerationSettings) -> Planner:
    """The planner that a request's settings ask for.

    Raises `SettingsError` for a wrong size, and for trees of a drafter that drafts none, and
    `UnsupportedTreeError` when the target cannot read them; "auto" is a chain then.
    """
    policy, tree_budget = settings.policy, settings.tree_budget
    if tree_budget == "auto":
        if drafter is not None and drafts_trees(drafter) and target.supports_trees:
            policy = policy or DraftPolicy.of(target, drafter, trees=True)
            if policy.trees is None:
                raise SettingsError('tree_budget "auto" needs DraftPolicy.of(..., trees=True).')
    elif tree_budget is not None:
        if not is_integer(tree_budget, 2, LARGEST_TREE):
            allowed = f'from 2 to {LARGEST_TREE}, or "auto"'
            raise SettingsError(f"tree_budget must be {allowed}, not {brief(tree_budget)}.")
        if not drafts_trees(drafter):
            raise SettingsError("tree_budget needs a drafter that drafts trees: leave it at None.")
        target.check_trees()
        return Planner(tree_budget)
    elif settings.block_size is not None:
        policy = None
    if policy is None or drafter is None:
        return Planner()
    return AdaptivePlanner(policy, settings.temperature)


def resolve_block_size(
    drafter: Drafter | None, requested: int | None = None, policy: DraftPolicy | None = None
) -> int:
    """The most rows of a step. Raises `SettingsError` for a size the drafter was not made for.

    A policy decides for a drafter that can draft any number of rows.
    """
    if requested is not None:
        requested = check_integer("block_size", requested)
    if drafter is None:
        return 1
    largest = drafter_block_size(drafter)
    if requested is None:
        return largest or (DEFAULT_BLOCK_SIZE if policy is None else policy.block_size)
    if largest is not None and requested > largest:
        raise SettingsError(
            f"block_size {requested} is more than the {largest} that this drafter can have: "
            "give less."
        )
    return requested


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several as a tuple. Raises `SettingsError`."""
    if not isinstance(stop, Iterable):
        raise SettingsError(f"stop must be one or more strings, not {brief(stop)}.")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not isinstance(text, str) or not text for text in strings):
        raise SettingsError("stop must be one or more strings that are not empty.")
    return strings
