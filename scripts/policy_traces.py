"""Record what drafts, chains and trees, would have brought at every place of some answers.

    python scripts/policy_traces.py [--out traces.json] [--model NAME] [--draft NAME] [--limit N]
        [--suites NAME,NAME --data DIR] [--free N] [--temperatures 0,1] [--max-tokens N]

Prompts of the embedded suite, or of the papers' suites, spread evenly over each, and free ones. A
trace is all that a policy can see or cause, so `policy_simulation.py` runs any policy on it
exactly, at any costs and with no clock. It has, for every token of an answer: the probability
of the target's favourite where it was chosen; how many slots of a whole block after it would have
been right; which rows of a tree of 64, best first; and how likely tree and chain said that their
rows were. A narrower block is taken to draft the beginning of the whole one: where all rows see
each other it is 1 to 3% worse than that. What is learnt of a drafter at a temperature
(`sharpness`, `calibration`) is kept from answer to answer. Answers are written and drafted
for side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiment import options_of, spread
from policy_speed import FREE

import dflash_mlx as dm

TREE, WIDEST = 64, 16  # rows
Asked = tuple[str, list[dict[str, str]], float]  # class, messages, temperature


def main() -> None:
    """Record and write."""
    options = options_of(
        __doc__ or "",
        out="traces.json",
        limit=8,
        max_tokens=256,
        suites="",
        data="",
        free=len(FREE),
        temperatures="0",
    )
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")
    target, drafter = dm.load(options.model, options.draft)
    recorder, traces = Recorder(target, drafter), []
    for batch in asked_together(options):
        for trace in recorder.record(batch, options.max_tokens):
            traces.append(trace | {"pair": options.model})
            right = trace["right"]
            counts = f"T={trace['temperature']:g} {len(right):4} tokens, {mean(right):5.2f} right"
            print(f"{trace['class']:12} {counts}  {trace['text'][:60]!r}", flush=True)
        Path(options.out).write_text(json.dumps(traces))


def asked_together(options: Any) -> list[list[Asked]]:
    """The prompts: one of each class at a time, at each temperature."""
    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
    from dflash_mlx.bench.suites import suite_prompts
    from dflash_mlx.loading.hub import Hub

    folder, classes = Path(options.data) if options.data else None, dict[str, list[Any]]()
    for suite in filter(None, options.suites.split(",")):
        prompts = suite_prompts(suite, Hub(), folder)
        classes[suite] = [list(prompt.messages) for prompt in spread(prompts, options.limit)]
    if not options.suites:
        for prompt in limit_per_category(embedded_prompts(), options.limit):
            classes.setdefault(prompt.category, []).append(list(prompt.messages))
    classes["free"] = [[{"role": "user", "content": text}] for text in FREE[: options.free]]
    temperatures = [float(number) for number in options.temperatures.split(",")]
    return [
        [(name, of[at], t) for name, of in classes.items() if at < len(of) for t in temperatures]
        for at in range(max(map(len, classes.values())))
    ]


class Recorder:
    """What records a pair's traces."""

    def __init__(self, target: dm.Target, drafter: Any) -> None:
        from dflash_mlx.drafter.protocol import block_size
        from dflash_mlx.policy.trees import TreePolicy

        self.target, self.drafter = target, drafter
        self.widest = min(WIDEST, block_size(drafter) or WIDEST)
        self.kept = TreePolicy.fixed(TREE)  # holds what is learnt at each temperature

    def record(self, asked: Sequence[Asked], max_tokens: int) -> list[dict[str, Any]]:
        """The traces of some prompts, whose answers are written together."""
        from dflash_mlx.drafter.batch import propose_batch, propose_tree_batch
        from dflash_mlx.prompt import encode_prompt

        prompts = [encode_prompt(self.target, messages) for _, messages, _ in asked]
        answers = self._answers(prompts, [t for _, _, t in asked], max_tokens)
        texts = [
            Passage(self, prompt, answer, t)
            for prompt, answer, (_, _, t) in zip(prompts, answers, asked, strict=True)
        ]
        for at in range(max_tokens):
            going = [text for text in texts if at < len(text.answer)]
            sessions = [text.drafting for text in going]
            anchors = [text.answer[at] for text in going]
            widths = [self.widest] * len(going)
            for text, anchor in zip(going, anchors, strict=True):
                text.sampler.commit([anchor])
            chains = propose_batch(sessions, anchors, widths)
            calibrations = [text.calibration for text in going]
            rows = [TREE] * len(going)
            trees = propose_tree_batch(sessions, anchors, rows, widths, calibrations)
            for text, chain, tree in zip(going, chains, trees, strict=True):
                text.take(at, chain, tree)
        return [
            {"class": name, "text": str(messages[-1]["content"]), "temperature": t} | text.trace
            for (name, messages, t), text in zip(asked, texts, strict=True)
        ]

    def _answers(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], max_tokens: int
    ) -> list[list[int]]:
        from dflash_mlx.engine.together import Flat
        from dflash_mlx.generation import GenerationSettings, start_request
        from dflash_mlx.loop import BatchItem, step

        requests, texts = [], list[list[int]]()
        for prompt, t in zip(prompts, temperatures, strict=True):
            settings: dict[str, Any] = {"temperature": t, "seed": 0} if t else {}
            request = start_request(
                self.target, None, prompt, GenerationSettings(max_tokens=max_tokens, **settings)
            )
            request.resume()
            texts.append([token for event in request.prefill() if event for token in event.tokens])
            requests.append(request)
        together = Flat(self.target, None)
        while going := [at for at, request in enumerate(requests) if not request.finished]:
            turns = [BatchItem(requests[at]) for at in going]
            step(turns, together)
            for at, turn in zip(going, turns, strict=True):
                if turn.event is None:
                    raise turn.error or AssertionError
                texts[at] += turn.event.tokens
        return texts


class Passage:
    """An answer that is drafted for at every place."""

    def __init__(
        self, of: Recorder, prompt: list[int], answer: list[int], temperature: float
    ) -> None:
        import mlx.core as mx

        from dflash_mlx.sampling import Sampler
        from dflash_mlx.settings import SamplingSettings

        text, self.answer = [*prompt, *answer], answer
        settings = SamplingSettings(temperature=temperature, seed=0 if temperature else None)
        self.sampler = Sampler(settings, prompt, of.kept.sharpness(temperature))
        self.calibration = of.kept.calibration(temperature)
        session = of.target.start(of.drafter.tap_layers)
        self.drafting = of.drafter.start(of.target, self.sampler)
        logits = of.target.model(mx.array([text[:-1]]))[0, len(prompt) - 1 :]
        self._taps = mx.concatenate([taps for _, taps in session.prefill(text[:-1])], axis=1)
        self.drafting.extend(self._taps[:, : len(prompt)])
        self._logits, self._start = logits.astype(mx.float32), len(prompt)
        scores = self.sampler.scores(self._logits)
        certainty: Any = mx.softmax(scores, axis=-1).max(axis=-1).tolist()
        self.trace: dict[str, Any] = {"prompt": len(prompt), "certainty": certainty}
        self.trace |= {"right": [], "tree": [], "sure": []}

    def take(self, at: int, chain: Any, tree: Any) -> None:
        """Take in what was drafted after one of the answer's tokens."""
        import mlx.core as mx

        from dflash_mlx.policy.trees import matching

        rest, logits = self.answer[at + 1 :], self._logits[at + 1 : at + 1 + len(chain)]
        if len(logits) == len(chain):  # the chains of other sharpnesses are judged by the text
            self.sampler.choose(chain, logits)
        drafted: Any = mx.array(chain.tokens).tolist()
        path: list[int] = []
        if len(rest) >= tree.slots:
            path = tree.tree.path(tree.learn(rest[: tree.slots]))
        said = {"tree": tree.tree.log_probs, "chain": tree.chain.log_probs}
        self.trace["right"].append(matching(drafted[1:], rest))
        self.trace["tree"].append(path)
        self.trace["sure"].append({key: [round(x, 2) for x in of] for key, of in said.items()})
        self.drafting.extend(self._taps[:, self._start + at : self._start + at + 1])


if __name__ == "__main__":
    main()
