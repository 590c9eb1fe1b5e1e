"""The decoding loop: propose, verify, accept, commit, emit.

Whatever drafts and whatever verifies, every round is these five steps, of one request or of many
together. Plain decoding is the same loop with a drafter that proposes nothing, so the baseline we
compare with is our own code.

The prefill reads the whole prompt, and what the target says after its last row is the first token
of the text and the first anchor: text already, like every anchor after it. So no round is special.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from .drafter.protocol import Drafter
from .events import Event, FinishReason, Result, Stats
from .generation import GenerationSettings, start_request
from .prompt import Prompt
from .proposal import Proposal
from .request import Request
from .targets import Target

Generate = TypeVar("Generate", bound=Callable[..., Any])


class Attempt(AbstractContextManager["Attempt", bool]):
    """A context that keeps what is raised in it, for whom it concerns.

    Attributes:
        error: what was raised; None if nothing was. In a thread of ours even what would end the
            program ends nothing, so it is kept, too.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep an error."""
        self.error = error or self.error
        return error is not None


class Turn(Attempt):
    """One request's part in a round. What a step of its own raises ends no other's round.

    Attributes:
        request: whose turn it is.
        proposal: what it has verified.
        event: what came of it; None where there is an error instead.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self.proposal: Proposal
        self.event: Event | None = None


class Together(Protocol):
    """How the requests of a round draft, and have their rows verified."""

    def propose(self, turns: Sequence[Turn]) -> None:
        """Set the proposals."""

    def verify(self, turns: Sequence[Turn]) -> Sequence[tuple[mx.array, mx.array]]:
        """Logits [N, V] after the rows of each proposal, and their features [1, N, K*D]; lazy."""

    def plain_next(self, turns: Sequence[Turn]) -> bool:
        """Whether their next round is plain, as far as that is decided for all of them."""

    def go_on(self, turns: Sequence[Turn]) -> None:
        """A round of these begins that was `plain_next`: the target reads their rows already."""

    def observe(self, turns: Sequence[Turn]) -> None:
        """Take in how the round went."""


def play_alone(request: Request) -> Event:
    """A round of one request, whose errors are whoever's who reads it.

    Where the round and the next one are plain, whatever this one brings, the device begins the next
    one before this one is read: then it never waits for the host, as in mlx-lm's own loop.
    """
    if not request.take_up(shared=False):
        proposal = request.propose()  # propose
        _start([proposal])
        request.decide(proposal, *request.target.verify(proposal))  # verify
    decided, taps = request.asked
    if request.plain_next:
        _compute([decided, taps])
        row = request.next_row()
        _compute(request.begin_next(row, *request.target.verify(row)))
    return request.absorb(_read(decided, [taps]))  # accept, commit, emit


def play_round(requests: Sequence[Request], together: Together) -> list[Turn]:
    """One round of these requests: one forward over all their rows, one wait for the device.

    What goes wrong in a step of one request alone is that turn's error, and the others go on. What
    is raised in a forward of all is raised here; then the caches of all are not to be trusted.
    """
    turns = [Turn(request) for request in requests]
    fresh = []
    for turn in turns:
        with turn:
            if not turn.request.take_up(shared=len(turns) > 1):
                fresh.append(turn)
    if fresh:
        together.propose(fresh)  # propose
    else:
        together.go_on(turns)

    going = _going(fresh)
    _start([turn.proposal for turn in going])
    answers = together.verify(going) if going else []  # verify, in one forward
    for turn, (logits, taps) in zip(going, answers, strict=True):
        with turn:
            turn.request.decide(turn.proposal, logits, taps)

    going = _going(turns)
    if going:
        numbers, features = zip(*(turn.request.asked for turn in going), strict=True)
        decided = mx.concatenate([*numbers])
        if together.plain_next(turns) and all(turn.request.plain_next for turn in going):
            _compute([decided, *features])  # as in `play_alone`
            _begin_next(going, together)
        values = _read(decided, features)
        borders = pairwise(accumulate((each.size for each in numbers), initial=0))
        for turn, (start, end) in zip(going, borders, strict=True):
            with turn:
                if turn.error is None:
                    turn.event = turn.request.absorb(values[start:end])  # accept, commit, emit
    together.observe(fresh or turns)  # those whom rows were shared out to
    return turns


def _begin_next(turns: Sequence[Turn], together: Together) -> None:
    """Have the device begin the next round of these, which is plain."""
    for turn in turns:
        with turn:
            turn.proposal = turn.request.next_row()
    going, asked = _going(turns), list[mx.array]()
    for turn, answer in zip(going, together.verify(going) if going else [], strict=True):
        with turn:
            asked += turn.request.begin_next(turn.proposal, *answer)
    _compute(asked)


def _going(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.error is None]


def _start(proposals: Sequence[Proposal]) -> None:
    """Have the device compute the drafts while the host writes down the target's forward."""
    drafts = [proposal.tokens for proposal in proposals if isinstance(proposal.tokens, mx.array)]
    if drafts:
        mx.async_eval(*drafts)


def _compute(asked: Sequence[mx.array]) -> None:
    """Have the device begin what is asked, features included, in a pass of its own.

    Nothing stays lazy, be it empty: another thread may go on with it.
    """
    mx.async_eval(*asked)


def _read(decided: mx.array, features: Sequence[mx.array]) -> list[int]:
    """The numbers that were decided, [M] int32. This is the round's only wait for the device.

    Features, if there are any, are computed in the same pass.
    """
    mx.eval(decided, *[taps for taps in features if taps.size])
    values: Any = decided.tolist()
    return values


def _decode(request: Request) -> Generator[Event, None, None]:
    """The prefill and the rounds of one request."""
    try:
        if request.finished:
            yield request.nothing()
            return
        for event in request.read():
            if event is not None:
                yield event
        while not request.finished:
            yield play_alone(request)
    finally:
        request.close()


def _listing_settings(function: Generate) -> Generate:
    """Have `help` and `inspect.signature` list the settings in place of `**settings`."""
    own = signature(function)
    pair = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    settings = signature(GenerationSettings).parameters.values()
    named = [setting.replace(kind=Parameter.KEYWORD_ONLY) for setting in settings]
    vars(function)["__signature__"] = own.replace(parameters=[*pair, *named])
    return function


@_listing_settings
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
    request = start_request(target, drafter, prompt, GenerationSettings.of(settings))
    request.resume()
    return _decode(request)


@_listing_settings
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
