"""The decoding loop: propose, verify, accept, commit, emit.

Every step of decoding is these five, whatever drafts and whatever verifies. Plain decoding is the
same loop with a drafter that proposes nothing, so the baseline is our own code.

The *anchor* is the last token of the text: chosen, but not yet in the target's cache. A step feeds
it to the target together with the drafted tokens that follow it. The prefill reads the whole prompt
and chooses the first anchor, so no step is special.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mlx.core as mx

from .drafter.protocol import Drafter
from .events import Event, FinishReason, Result, Stats
from .generation import GenerationSettings, make_request, with_settings
from .memory import compute
from .prompt import Prompt
from .request import Request, Step
from .targets import Target


def decode(request: Request) -> Generator[Event, None, None]:
    """The prefill and the steps of a request: each step is one forward of the target and one wait.

    A run of plain steps is as fast as mlx-lm's loop, in the same way: each starts before the last
    one is read, so the device never waits for the host. The engine's `SharedBatch.step` does the
    same for many requests, with one forward for all.
    """
    ahead: Step | None = None  # a plain step that has started; the anchor is its row
    try:
        if request.finished:
            yield request.empty_event()
            return
        first_event = request.prefill()
        if first_event is not None:
            yield first_event
        request.finish_prompt()
        while not request.finished:
            request.begin_step()
            step = ahead
            ahead = None
            following = None
            if step is None:
                proposal = request.propose()
                if isinstance(proposal.tokens, mx.array):
                    # The device computes the drafts while the host builds the target's forward.
                    compute(proposal.tokens, wait=False)
                step = request.verify(proposal)
            if request.can_go_ahead(step):
                # The next step is plain for certain. It starts before this one is read.
                compute(step.choices, step.taps, wait=False)
                following = request.go_ahead(step)
                compute(following.choices, following.taps, wait=False)
            compute(step.choices, step.taps)  # the only wait
            choices: Any = step.choices.tolist()
            rows, tokens = request.accept(step, choices)
            event = request.commit(step, rows, tokens, following)
            ahead = following
            yield event
    finally:
        request.close(ahead)


@with_settings(GenerationSettings)
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
    return decode(request)


@with_settings(GenerationSettings)
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
