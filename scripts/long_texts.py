"""Time whole answers after long prompts: mlx-lm, ours plain, and drafts that pay or never do.

    python scripts/long_texts.py [--model tiny] [--lengths 1000,4000,8000] [--max-tokens 128]

All methods take turns in one process. "pays" computes the network's drafts, but verifies the right
tokens instead, because the embedded drafter was trained on short texts. "never pays" is the same
drafter with its features mixed up: its drafts cost as much, and are wrong. Prints seconds in all,
to the first token, of the first step, in which the drafter reads the prompt, and of a later step,
and the ratio of the total to mlx-lm's.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from experiment import in_turns, mlx_lm_tokens, numbers, options_of


class Seconds(NamedTuple):
    """The times of an answer.

    Attributes:
        total: of the whole answer.
        first_token: until the first token.
        first_step: of the first step after it, in which a drafter reads the prompt.
        later_step: of any later step, on average.
    """

    total: float
    first_token: float
    first_step: float
    later_step: float


class TextOracle:
    """Computes a network's drafts, for their cost, but proposes the tokens of a known text."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.tap_layers = network.tap_layers
        self.block_size = 16
        self.text: list[int] = []

    def start(self, target: Any, sampler: Any) -> Any:
        """Begin one request."""
        import mlx.core as mx

        import dflash_mlx as dm

        session = self.network.start(target, sampler)
        original_propose = session.propose

        def propose(anchor: int, width: int) -> Any:
            if width > 1:
                mx.async_eval(original_propose(anchor, width).tokens)
            after = session.position + 1
            return dm.Proposal([anchor, *self.text[after : after + width - 1]])

        session.propose = propose
        return session


def mlx_lm_seconds(target: Any, prompt: list[int], max_tokens: int) -> Seconds:
    """Time mlx-lm's own loop, whose steps have one token each."""
    start = time.perf_counter()
    times = list[float]()
    for _ in mlx_lm_tokens(target, prompt, max_tokens):
        times.append(time.perf_counter() - start)
    later = (times[-1] - times[1]) / (len(times) - 2)
    return Seconds(times[-1], times[0], first_step=times[1] - times[0], later_step=later)


def seconds(target: Any, drafter: Any, prompt: list[int], max_tokens: int) -> Seconds:
    """Decode with our loop and a new policy."""
    import dflash_mlx as dm

    policy = None if drafter is None else dm.DraftPolicy.of(target, drafter)
    start = time.perf_counter()
    result = dm.generate(target, drafter, prompt, max_tokens=max_tokens, policy=policy)
    total = time.perf_counter() - start
    stats = result.stats
    first = stats.first_round_seconds
    later = (stats.decode_seconds - first) / max(1, stats.rounds - 1)
    return Seconds(total, stats.first_token_seconds, first_step=first, later_step=later)


def drafters_of(model: str) -> dict[str, Any]:
    """The drafters by the name that is printed: one that pays, and one that never does."""
    import mlx.core as mx

    import dflash_mlx as dm

    intact = dm.load_drafter(model)
    mixed_up = dm.load_drafter(model)
    mixed_up.fc.weight = mixed_up.fc.weight[:, ::-1]
    mx.eval(mixed_up.fc.weight)
    return {"pays": TextOracle(intact), "never pays": mixed_up}


def main() -> None:
    """See the module's docstring."""
    args = options_of(__doc__, model="tiny", lengths="1000,4000,8000", max_tokens=128, repeats=3)
    import dflash_mlx as dm

    dm.use_fast_blas()
    from dflash_mlx.bench.datasets import embedded_prompts

    target = dm.load_target(args.model)
    target.context_length = 2**20  # no prompt is too long
    target.tokenizer.eos_token_ids = set()  # every answer has as many tokens
    drafters = drafters_of(args.model)
    text = ""
    for example in embedded_prompts():
        text += f"{example.messages[-1]['content']} {example.answer}\n"
    ids = target.tokenizer.encode(text * 3)  # three times are enough for the longest prompt
    for length in numbers(args.lengths):
        prompt = ids[:length]
        plain = dm.generate(target, None, prompt, max_tokens=args.max_tokens)
        # It drafts the known answer.
        drafters["pays"].text = [*prompt, *plain.tokens]
        methods = {"mlx-lm": partial(mlx_lm_seconds, target, prompt, args.max_tokens)}
        for name, drafter in {"plain": None, **drafters}.items():
            methods[name] = partial(seconds, target, drafter, prompt, args.max_tokens)
        results = in_turns(methods, args.repeats)
        base = median(run.total for run in results["mlx-lm"])
        for name, runs in results.items():
            middle = Seconds(*(median(values) for values in zip(*runs, strict=True)))
            print(
                f"{length:6} tokens  {name:13}  {middle.total:6.2f} s, "
                f"first token {middle.first_token:6.2f} s, first step {middle.first_step:5.2f} s, "
                f"a step {1e3 * middle.later_step:6.1f} ms, "
                f"{middle.total / base:.2f} of mlx-lm's",
                flush=True,
            )


if __name__ == "__main__":
    main()
