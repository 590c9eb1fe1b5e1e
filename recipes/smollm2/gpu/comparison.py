"""Compare this recipe with the package, on a CPU in float32: needs both PyTorch and MLX.

    python -m smollm2.gpu.check        a minute on two cores

1. Greedy answers to eight prompts: the same tokens, or the first difference and what the package's
   logits of the two tokens differ by.
2. How many steps with whole blocks these answers take: in the package's loop, and by `acceptance`.
3. Training steps on the same batches from the shipped weights: both losses of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch

import dflash_mlx
from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.loading.load import load_drafter
from dflash_mlx.prompt import encode_prompt
from dflash_mlx.targets import Target
from dflash_mlx.train.dataset import Arrays, BatchStream
from dflash_mlx.train.dataset import Sample as PackageSample
from dflash_mlx.train.drafter import AnchorCollator, DrafterSettings, train_drafter
from dflash_mlx.train.fit import MICRO_BATCHES, StepReport, schedule
from dflash_mlx.train.losses import LossWeights

from ..run import open_target
from .acceptance import acceptance
from .drafter import Batch, Drafter, start_weights
from .features import TOP, Features, Sample
from .stored import load
from .target import SmolLM2, installed_file
from .training import Training
from .writer import Task, Writer

PROMPTS = 8
LENGTH = 512  # of a sequence
SHIPPED = Path(dflash_mlx.__file__).parent / "smollm2"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description="Compare the recipe in PyTorch with the package.")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    package = open_target()
    target = SmolLM2(installed_file(), "cpu", torch.float32)
    samples = compare_answers(package, target, options.max_tokens)
    compare_acceptance(package, target, samples)
    compare_losses(package, target, samples, options.steps)


def compare_answers(package: Target, target: SmolLM2, max_tokens: int) -> list[Sample]:
    """Answer some of the embedded pair's prompts with both; returns this recipe's answers."""
    questions = [prompt.question for prompt in embedded_prompts()][::5][:PROMPTS]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = target.encode_all(chats)
    same = sum(
        encode_prompt(package, chat) == prompt for chat, prompt in zip(chats, prompts, strict=True)
    )
    print(f"prompts of the same token ids: {same} of {len(prompts)}")
    tasks: list[Task] = []
    writer = Writer(target, slots=PROMPTS, length=LENGTH)
    writer.write([Task(i, p, max_tokens) for i, p in enumerate(prompts)], tasks.append)
    for task in sorted(tasks, key=lambda task: task.number):
        text = dflash_mlx.generate(package, None, task.prompt, max_tokens=max_tokens).tokens
        pairs = zip(text, task.answer, strict=False)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        print(f"answer {task.number}: {len(task.answer)} tokens, ", end="")
        if first is None:
            print("equal" if len(text) >= len(task.answer) else "of other lengths")
            continue
        read = mx.array([list(task.prompt) + text[:first]])
        logits, _ = package.features(read, (0,))
        gap = float(logits[0, -1, text[first]] - logits[0, -1, task.answer[first]])
        print(f"the first difference at {first}, {gap:.5f} between the two logits")
    return [Sample(list(task.prompt) + task.answer, len(task.prompt)) for task in tasks]


def compare_acceptance(package: Target, target: SmolLM2, samples: list[Sample]) -> None:
    """Decode the answers again with the shipped drafter, and count the steps."""
    drafter = load_drafter("smollm2")
    package_steps = [
        dflash_mlx.generate(
            package,
            drafter,
            sample.tokens[: sample.start],
            max_tokens=len(sample.tokens) - sample.start,
            block_size=drafter.block_size,
        ).stats.rounds
        for sample in samples
    ]
    config, weights = load(SHIPPED)
    features = Features(target, config["dflash_config"]["target_layer_ids"], samples)
    network = Drafter(config, target, torch.ones(()))
    tokens, steps = acceptance(network, weights, features)
    print(f"steps for {tokens} tokens: {sum(package_steps)} of the package's loop, {steps} here")


def compare_losses(package: Target, target: SmolLM2, samples: list[Sample], steps: int) -> None:
    """Train with both for some steps, and print the losses of each."""
    settings = DrafterSettings(
        steps=steps,
        tokens=512,
        anchors=8,
        learning_rate=0.005,
        optimizer="muon",
        loss_weights=LossWeights(cross_entropy=0.5, kl=0.5),
    )
    same = [PackageSample(tuple(s.tokens), ((s.start, len(s.tokens)),)) for s in samples]
    config, weights = load(SHIPPED)
    start = load_drafter("smollm2")  # on a CPU it has matrices in bf16, rounded
    start.load_weights([(name, mx.array(weight.numpy())) for name, weight in weights.items()])
    reports: list[StepReport] = []
    train_drafter(
        package, start.config, lambda epoch: same, settings, progress=reports.append, start=start
    )
    layers = config["dflash_config"]["target_layer_ids"]
    scales = Features(target, layers, samples).tap_scales()
    config, weights = start_weights(config, weights, scales, config["num_hidden_layers"], 0)
    training = Training(Drafter(config, target, scales), weights)
    collate = AnchorCollator(settings.anchors, settings.tokens)
    stream = BatchStream(lambda epoch: same, collate, settings.tokens, settings.seed)
    rate = schedule(settings.learning_rate, steps)
    print("step   package  PyTorch  tau of both")
    for report in reports:
        batches = [as_batch(target, layers, stream.next()) for _ in range(MICRO_BATCHES)]
        loss, tau = training.step(batches, float(rate(mx.array(report.step - 1))))
        print(f"{report.step:4} {report.loss:9.5f} {loss:8.5f} {report.metric:7.4f} {tau:.4f}")


@torch.no_grad()
def as_batch(target: SmolLM2, layers: list[int], arrays: Arrays) -> Batch:
    """A batch of the package's trainer as one of this recipe, with the features of `layers`."""
    tokens, anchors, ends = (torch.from_numpy(np.array(array)).long() for array in arrays)
    hidden, taps = target.read(tokens, layers)
    logits = target.head(hidden)
    tops = logits.topk(TOP, dim=-1)
    shares = (tops.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
    joined = torch.cat(taps, dim=-1)
    return Batch(tokens, anchors, ends, joined, tops.indices[..., 0], tops.indices, shares)
