"""The decoding loop: propose, verify, accept, commit, emit.

Whatever drafts and whatever verifies, every round is these five steps. Plain decoding is the same
loop with a drafter that proposes nothing, so the baseline we compare with is our own code.

The prefill reads the whole prompt, and what the target says after its last row is the first token
of the text and the first anchor: text already, like every anchor after it. So no round is special.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, Literal, ParamSpec, Unpack

from .conversation import Conversation
from .drafter.protocol import Drafter
from .drafter.protocol import block_size as drafter_block_size
from .errors import SettingsError
from .events import Event, FinishReason, Result, Stats
from .policy.rounds import AnyPolicy, plan_rounds
from .prompt import Prompt, encode_prompt
from .reading import is_whole, shown
from .request import Request
from .sampling import History, Sampler, Sampling
from .stream import TextStream
from .target import Target

DEFAULT_BLOCK_SIZE = 16

Settings = ParamSpec("Settings")


def stream_generate(
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
    conversation: Conversation | None = None,
    **history: Unpack[History],
) -> Iterator[Event]:
    """Generate text and yield it as it becomes certain: an event of the prefill, then one a round.

    Args:
        target: the model whose text this is.
        drafter: a `DFlash` network, anything else that fits `drafter.protocol`, or None for plain
            decoding.
        prompt: text, token ids, or chat messages (then the target's chat template is applied).
        max_tokens: the most tokens to generate, an EOS token included; the context limits it too.
        temperature, top_p, top_k, min_p, seed, and the other settings of `Sampling` (penalties,
            logit bias, processors): how tokens are chosen. A seed's text is the same with and
            without a drafter, and whatever the block size.
        block_size: rows verified per round, the anchor included; None is the drafter's own, or
            what the policy says.
        policy: decides the width of every round, unless block_size does, and keeps what it has
            learnt about the pair for the next request; None drafts whole blocks.
        tree_budget: rows of a draft tree verified per round, the anchor included, where a path
            has `block_size` at most; "auto" as many as pay, a chain among them; None drafts chains
            unless the policy is a `TreePolicy`.
        kv_bits: 8 or 4 quantizes the target's keys and values, drafting or not; None does not.
        stop: strings that end the text; they are not part of it.
        conversation: keeps the caches for the next request, which reads only what is new to them.

    Returns:
        An iterator of events; the last one has a `finish_reason`. Any thread may read the next,
        one at a time, and abandon or close it: nothing is installed in the target between rounds.

    Raises:
        SettingsError, PromptError, IncompatibleDrafterError: at once, before any work;
            UnsupportedTreeError, too, where tree_budget asks a target for what it cannot read.
        ProposalError: later, when the drafter's proposal is not a draft from the anchor.
    """
    settings = Sampling.of(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, **history
    )
    if not is_whole(max_tokens, 0, sys.maxsize):
        raise SettingsError(
            f"max_tokens must be a whole number, 0 or more, not {shown(max_tokens)}."
        )
    _check_kinds(drafter, policy, conversation)
    widest = widest_block(drafter, block_size)
    strings = _stop_strings(stop)
    settings.check_vocabulary(target.vocab_size)
    ids = encode_prompt(target, prompt)
    conversation = conversation or Conversation(target, drafter, kv_bits)
    conversation.check(target, drafter, kv_bits)
    policy = policy if drafter is not None else None
    rounds = plan_rounds(target, drafter, policy, block_size, tree_budget, temperature, kv_bits)
    sampler = Sampler(settings, ids, rounds.sharpness)
    tokens = min(max_tokens, target.context_length - len(ids))
    tokenizer = target.tokenizer
    request = Request(
        conversation,
        ids,
        sampler,
        rounds,
        TextStream(tokenizer.detokenizer, tokenizer.eos_token_ids, strings, tokens),
        Stats(
            prompt_tokens=len(ids),
            block_size=widest,
            seed=sampler.seed,
        ),
    )
    events = _decode(request)
    conversation.open(events)
    request.stats.reused_tokens = conversation.resume(ids, sampler)
    return events


def _to_the_end(stream: Callable[Settings, Iterator[Event]]) -> Callable[Settings, Result]:
    """A function with the parameters of `stream` that gathers its events in a result."""

    def generate(*given: Settings.args, **settings: Settings.kwargs) -> Result:
        """Generate to the end; the arguments and errors are those of `stream_generate`."""
        text: list[str] = []
        tokens: list[int] = []
        finish_reason: FinishReason = "length"
        stats = Stats()
        for event in stream(*given, **settings):
            text.append(event.text)
            tokens += event.tokens
            finish_reason = event.finish_reason or finish_reason
            stats = event.stats
        return Result("".join(text), tokens, finish_reason, stats)

    # What completion and help() show: the parameters are declared in one place.
    vars(generate)["__signature__"] = signature(stream).replace(return_annotation="Result")
    return generate


generate = _to_the_end(stream_generate)


def _decode(request: Request) -> Generator[Event, None, None]:
    """The rounds of one request; what it proposes and how it accepts is in `request`."""
    if request.finished:
        yield request.nothing()
        return
    yield request.prefill()
    while not request.finished:
        proposal = request.propose()
        logits, taps = request.target.verify(proposal)  # one forward over all rows
        values: Any = request.decide(logits, taps).tolist()  # the round's only wait
        yield request.absorb(values)  # accept, commit, emit


def _check_kinds(drafter: Any, policy: Any, conversation: Any) -> None:
    """Raise `SettingsError` for an object that is not of the kind that its place asks for."""
    for name, value, kind, how in (
        ("drafter", drafter, Drafter, "dm.load_drafter(...)"),
        ("policy", policy, AnyPolicy, "dm.Policy.of(target, drafter)"),
        ("conversation", conversation, Conversation, "dm.Conversation(target, drafter)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise SettingsError(f"{name} must be None or such as {how}, not {shown(value)}.")


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """None, one string or several as a tuple. Raises `SettingsError`."""
    if stop is not None and not isinstance(stop, Iterable):
        raise SettingsError(f"stop must be one or more strings, not {shown(stop)}.")
    strings = (stop,) if isinstance(stop, str) else tuple(() if stop is None else stop)
    if any(not isinstance(text, str) or not text for text in strings):
        raise SettingsError("stop must be one or more strings that are not empty.")
    return strings


def widest_block(drafter: Drafter | None, requested: int | None = None) -> int:
    """The most rows of a round. Raises `SettingsError` for a size the drafter was not made for."""
    if requested is not None and not is_whole(requested):
        raise SettingsError(
            f"block_size must be a whole number, 1 or more, not {shown(requested)}."
        )
    if drafter is None:
        return 1
    largest = drafter_block_size(drafter)
    if requested is None:
        return largest or DEFAULT_BLOCK_SIZE
    if largest is not None and requested > largest:
        raise SettingsError(
            f"block_size {requested} is more than the {largest} this drafter was trained for."
        )
    return requested
