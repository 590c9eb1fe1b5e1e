"""The settings of a request, checked before anything is done for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Unpack

from .conversation import Conversation
from .drafter.protocol import Drafter, check_pair
from .drafter.protocol import block_size as drafter_block_size
from .errors import SettingsError
from .events import Stats
from .policy.rounds import AnyPolicy, plan_rounds
from .prefix.protocol import Prefix
from .prompt import Prompt, encode_prompt, parting_places
from .request import Request
from .sampling import Sampler
from .settings import History, Sampling
from .stream import TextStream, in_the_middle
from .targets import Target
from .targets.caches import check_kv_bits
from .validation import brief, check_integer, check_type, is_integer

DEFAULT_BLOCK_SIZE = 16


def begin(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    block_size: int | None = None,
    policy: AnyPolicy | None = None,
    tree_budget: int | Literal["auto"] | None = None,
    kv_bits: int | None = None,
    stop: str | Sequence[str] | None = None,
    continues: bool = False,
    conversation: Conversation | None = None,
    prefix: Prefix | None = None,
    salt: str = "",
    **history: Unpack[History],
) -> Request:
    """Text, as it becomes certain: an event of the prefill, then one a round.

    `stream_generate` yields the events, `generate` gathers them, and `Engine.submit` has them made
    together with those of other requests. Any thread may read the next event of a stream, one at a
    time, and abandon or close it: nothing is installed in the target between rounds.

    Args:
        target: the model whose text this is.
        drafter: a `DFlash` network, anything else that fits `drafter.protocol`, or None for plain
            decoding.
        prompt: text, token ids, or chat messages (then the target's chat template is applied).
        max_tokens: the most tokens to generate, an EOS token included; the context limits it too.
        temperature, top_p, top_k, min_p, seed, and the other settings of `Sampling` (penalties,
            logit bias, processors): how tokens are chosen. A seed's text is the same with and
            without a drafter, whatever the block size, and whoever shares its rounds.
        block_size: rows verified per round, the anchor included; None is the drafter's own, or
            what the policy says. At most: without a drafter every round has one.
        policy: decides the width of every round, unless block_size does, and keeps what it has
            learnt about the pair for the next request; None drafts whole blocks.
        tree_budget: rows of a draft tree verified per round, the anchor included, where a path
            has `block_size` at most; "auto" as many as pay, a chain among them; None drafts chains
            unless the policy is a `TreePolicy`.
        kv_bits: 8 or 4 quantizes the target's keys and values, drafting or not; None does not.
        stop: strings that end the text; they are not part of it.
        continues: whether the text goes on where the prompt ends, so that a space that it begins
            with is part of it. As in mlx-lm it is left out otherwise.
        conversation: keeps the caches for the next request, which reads only what is new to them.
        prefix: a `PrefixStore` of the pair, to begin in and to store what is read for any other
            request; a conversation has its own.
        salt: who may share in what the prefix store has of this request: those with the same.

    Returns:
        The events; the last one has a `finish_reason`. (`begin` itself: the request, whose caches
        are to be made ready.)

    Raises:
        SettingsError, PromptError, IncompatibleDrafterError: at once, before any work;
            UnsupportedTreeError, too, where tree_budget asks a target for what it cannot read.
        ProposalError: later, when the drafter's proposal is not a draft from the anchor.
    """
    _check_names(history)
    settings = Sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, **history
    )
    if not is_integer(max_tokens, 0, math.inf):
        raise SettingsError(
            f"max_tokens must be a whole number, 0 or more, not {brief(max_tokens)}."
        )
    check_kinds(target, drafter, policy, conversation, prefix)
    widest = widest_block(drafter, block_size)
    strings = _stop_strings(stop)
    if not isinstance(continues, bool):
        raise SettingsError(f"continues must be True or False, not {brief(continues)}.")
    settings.check_vocabulary(target.vocab_size)
    ids = encode_prompt(target, prompt)
    if not isinstance(salt, str):
        raise SettingsError(f"salt must be text, not {brief(salt)}.")
    if conversation is not None and (prefix is not None or salt):
        name = "salt" if prefix is None else "prefix"
        raise SettingsError(f"{name}: give it to the Conversation, when that is made.")
    check_kv_bits(kv_bits)
    conversation = conversation or Conversation(target, drafter, kv_bits, prefix=prefix, salt=salt)
    conversation.check(target, drafter, kv_bits)
    policy = policy if drafter is not None else None
    how = block_size, tree_budget, temperature, kv_bits
    rounds = plan_rounds(target, drafter, policy, *how, ahead=not settings.edits)
    sampler = Sampler(settings, ids, rounds.sharpness)
    tokens = min(int(max_tokens), target.context_length - len(ids))
    tokenizer = target.tokenizer
    detokenizer = tokenizer.detokenizer
    if continues:
        in_the_middle(detokenizer, tokenizer)
    text = TextStream(detokenizer, tokenizer.eos_token_ids, strings, tokens)
    stats = Stats(prompt_tokens=len(ids), block_size=widest, seed=sampler.seed)
    ends = parting_places(target, prompt, ids) if conversation.shares else ()
    request = Request(conversation, ids, sampler, rounds, text, stats, ends)
    conversation.open(request)
    return request


def _check_names(history: Iterable[str]) -> None:
    """Raise `SettingsError` for the name of a setting that there is not."""
    for name in history:
        if name not in History.__annotations__:
            known = [*(begin.__kwdefaults__ or ()), *History.__annotations__]
            near = get_close_matches(name, known, n=1)
            told = f"Did you mean {near[0]}?" if near else "help(dflash_mlx.generate) lists them."
            raise SettingsError(f"There is no setting {name!r}. {told}")


def check_kinds(
    target: Any, drafter: Any, policy: Any, conversation: Any = None, prefix: Any = None
) -> None:
    """Raise `SettingsError` for an object that is not of the kind that its place asks for."""
    check_pair(target, drafter)
    check_type("policy", policy, AnyPolicy, "dm.Policy.of(target, drafter)")
    check_type("conversation", conversation, Conversation, "dm.Conversation(target, drafter)")
    check_type("prefix", prefix, Prefix, "dm.PrefixStore(target, drafter, memory=...)")


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """None, one string or several as a tuple. Raises `SettingsError`."""
    if stop is not None and not isinstance(stop, Iterable):
        raise SettingsError(f"stop must be one or more strings, not {brief(stop)}.")
    strings = (stop,) if isinstance(stop, str) else tuple(() if stop is None else stop)
    if any(not isinstance(text, str) or not text for text in strings):
        raise SettingsError("stop must be one or more strings that are not empty.")
    return strings


def widest_block(drafter: Drafter | None, requested: int | None = None) -> int:
    """The most rows of a round. Raises `SettingsError` for a size the drafter was not made for."""
    requested = None if requested is None else check_integer("block_size", requested)
    if drafter is None:
        return 1
    largest = drafter_block_size(drafter)
    if requested is None:
        return largest or DEFAULT_BLOCK_SIZE
    if largest is not None and requested > largest:
        raise SettingsError(
            f"block_size {requested} is more than the {largest} that this drafter can have: "
            "give less."
        )
    return requested
