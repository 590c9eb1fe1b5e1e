"""The decoding loop: propose, verify, accept, commit, emit.

Every step of decoding is these five, whatever drafts and whatever verifies, for one request or for
many at once. Plain decoding is the same loop with a drafter that proposes nothing, so the baseline
that we compare with is our own code.

The *anchor* is the last token of the text: chosen, but not yet in the target's cache. A step feeds
it to the target together with the drafted tokens that follow it. The prefill reads the whole prompt
and chooses the first anchor, so no step is special.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx

from .drafter.protocol import Drafter
from .events import Event, FinishReason, Result, Stats
from .generation import GenerationSettings, make_request
from .prompt import Prompt
from .proposal import Proposal
from .request import Request
from .targets import Target

Settings = ParamSpec("Settings")
T = TypeVar("T")


class ErrorCapture:
    """A context that captures an exception, so that one request's error does not end the batch.

    Attributes:
        error: the last exception raised inside, a BaseException too; None for none.
    """

    error: BaseException | None = None

    def __enter__(self) -> ErrorCapture:
        """The capture itself, whose `error` is known afterwards."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep an exception."""
        self.error = error or self.error
        return error is not None


class BatchItem(ErrorCapture):
    """One request's part in a step. `with item:` captures the errors of this request alone.

    Attributes:
        request: the request.
        proposal: the rows that the target verifies for it.
        event: the result; None if there is an error instead.
    """

    proposal: Proposal
    event: Event | None = None

    def __init__(self, request: Request) -> None:
        self.request = request


class Batch:
    """How the requests of a step draft and verify. Here each does so alone; the engine shares."""

    def propose(self, items: Sequence[BatchItem]) -> None:
        """Set the items' proposals."""
        for item in items:
            with item:
                item.proposal = item.request.propose()

    def verify(self, items: Sequence[BatchItem]) -> Sequence[tuple[mx.array, mx.array]]:
        """Logits [N, V] after each row of a proposal and its taps [1, N, K*D], per item; lazy."""
        return [item.request.target_session.verify(item.proposal) for item in items]

    def can_pipeline(self, items: Sequence[BatchItem]) -> bool:
        """Whether the next step of these may start before this one is read; see `start_next`."""
        return True

    def observe(self, items: Sequence[BatchItem]) -> None:
        """Learn from the step's outcome."""


def step(items: Sequence[BatchItem], batch: Batch) -> None:
    """Advance these requests by one step, with one forward of the target and one wait for it.

    An error in one request's own part becomes its `item.error`, and the others go on. An error in
    a forward is raised here: then no cache of these requests can be trusted.

    Args:
        items: one new item per request; their events and errors are set.
        batch: drafts and verifies for all of them.
    """
    new = []  # requests whose verify forward the last step did not start
    for item in items:
        with item:
            if not item.request.prepare_step(shared=len(items) > 1):
                new.append(item)
    if new:
        batch.propose(new)  # propose
        _verify(new, batch)  # verify

    running = _without_errors(items)
    if running:
        chosen, taps = zip(*[item.request.pending for item in running], strict=True)
        choices = mx.concatenate(list(chosen))
        if batch.can_pipeline(items) and all(item.request.can_start_next for item in running):
            start_next(running, batch)
        mx.eval(choices, *taps)  # the only wait
        values: Any = choices.tolist()
        for item, own in zip(running, chosen, strict=True):
            with item:
                if item.error is None:
                    accepted = item.request.accept(values[: own.size])  # accept
                    item.request.commit(accepted)  # commit
                    item.event = item.request.emit(accepted)  # emit
            values = values[own.size :]
    batch.observe(new or items)


def start_next(items: Sequence[BatchItem], batch: Batch) -> None:
    """Start a plain step before the last one is read, as mlx-lm's loop does.

    The anchor is still on its way on the device, which therefore never waits for the host.
    """
    _compute_pending(items)
    for item in items:
        with item:
            item.proposal = item.request.next_anchor()
    _verify(items, batch)
    _compute_pending(_without_errors(items))


def _verify(items: Sequence[BatchItem], batch: Batch) -> None:
    """Verify the proposals in one forward, and choose the token after each row. Lazy."""
    items = _without_errors(items)
    if not items:
        return
    # The device computes the drafts while the host builds the target's forward.
    drafts = [t for item in items if isinstance(t := item.proposal.tokens, mx.array)]
    mx.async_eval(drafts)
    for item, (logits, taps) in zip(items, batch.verify(items), strict=True):
        with item:
            item.request.choose(item.proposal, logits, taps)


def _without_errors(items: Sequence[BatchItem]) -> list[BatchItem]:
    return [item for item in items if item.error is None]


def _compute_pending(items: Sequence[BatchItem]) -> None:
    """Have the device compute what the requests' last forwards return."""
    mx.async_eval([item.request.pending for item in items])


def _events(request: Request) -> Generator[Event, None, None]:
    """The prefill and the steps of one request."""
    batch = Batch()
    try:
        if request.finished:
            yield request.empty_event()
            return
        for event in request.prefill():
            if event is not None:
                yield event
        while not request.finished:
            item = BatchItem(request)
            step([item], batch)
            if item.event is None:
                raise item.error or AssertionError("a step without event or error")
            yield item.event
    finally:
        request.close()


def _with_settings(
    settings: Callable[Settings, GenerationSettings],
) -> Callable[
    [Callable[..., T]], Callable[Concatenate[Target, Drafter | None, Prompt, Settings], T]
]:
    """Have type checkers, `help` and `signature` see the settings in place of `**settings`."""

    def decorate(
        function: Callable[..., T],
    ) -> Callable[Concatenate[Target, Drafter | None, Prompt, Settings], T]:
        own = signature(function)
        pair = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        fields = signature(settings).parameters.values()
        named = [field.replace(kind=Parameter.KEYWORD_ONLY) for field in fields]
        vars(function)["__signature__"] = own.replace(parameters=[*pair, *named])
        return function

    return decorate


@_with_settings(GenerationSettings)
def stream_generate(
    target: Target, drafter: Drafter | None, prompt: Prompt, **settings: Any
) -> Generator[Event, None, None]:
    """Generate text step by step: one event for the first token, then one per step.

    Any thread may read the next event, one at a time, or close the generator: nothing is installed
    in the target between steps. A seed's text is the same with and without a drafter, whatever the
    block size, and whichever requests share its steps.

    Args:
        target: the model whose text this is.
        drafter: a `DFlash` network, another drafter (see `drafter.protocol`), or None for plain
            decoding.
        prompt: text, token ids, or chat messages (then the target's chat template is applied).
        settings: the fields of `dflash_mlx.GenerationSettings`, which describes them:
            max_tokens, temperature, top_p, top_k, min_p, seed, stop, block_size, policy,
            tree_budget, kv_bits, conversation, prefix, penalties, logits_processors, ...

    Returns:
        The events; the last one has a `finish_reason`.

    Raises:
        SettingsError, PromptError, IncompatibleDrafterError: at once, before any work. So does
            UnsupportedTreeError, if `tree_budget` is given for a target that reads chains only.
        ProposalError: later, if the drafter's proposal is not a draft from the last token.
    """
    request = make_request(target, drafter, prompt, GenerationSettings.of(settings))
    request.resume()
    return _events(request)


@_with_settings(GenerationSettings)
def generate(target: Target, drafter: Drafter | None, prompt: Prompt, **settings: Any) -> Result:
    """Generate to the end.

    Args:
        target, drafter, prompt: as in `stream_generate`.
        settings: the fields of `dflash_mlx.GenerationSettings`, which describes them.

    Raises what `stream_generate` raises.
    """
    text: list[str] = []
    tokens: list[int] = []
    finish_reason: FinishReason = "length"
    stats = Stats()
    for event in stream_generate(target, drafter, prompt, **settings):
        text.append(event.text)
        tokens += event.tokens
        finish_reason = event.finish_reason or finish_reason
        stats = event.stats
    return Result("".join(text), tokens, finish_reason, stats)
