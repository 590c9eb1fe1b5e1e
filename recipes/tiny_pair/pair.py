"""The recipe of the embedded pair, from nothing: tokenizer, target, drafter, held-out prompts,
scores.

A drafter learns the corpus first, then that and what the target says to requests it knows nothing
about. A drafter of the corpus alone was wrong about most of what the target says to people.

    cd recipes && python -m tiny_pair OUT --work FOLDER

Every stage leaves its result on disk and is skipped when it is there already; a stage that was
interrupted resumes from its checkpoint in the work folder. For another target or recipe, take other
folders: nothing checks what made the files that are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.utils import load_tokenizer

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.loading.load import load_drafter, load_target
from dflash_mlx.targets import Target
from dflash_mlx.train.dataset import BatchStream, Sample, encode_chat
from dflash_mlx.train.drafter import DrafterSettings, save_drafter, train_drafter
from dflash_mlx.train.fit import fit, make_optimizer

from . import corpus
from .evaluate import evaluate, total
from .own import (
    DRAFTER_SEED,
    EPOCH,
    OWN_REQUESTS,
    OWN_SEED,
    SCORED,
    SUITE_SIZE,
    different_requests,
    own_answers,
)
from .progress import Printer, say
from .target import collate, new_model, next_token_loss, save_model
from .tokenizer import save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

VOCAB_SIZE = 1024
CONTEXT = 2048  # tokens
TARGET_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
    "eos_token_id": 2,
}
DRAFTER_CONFIG: dict[str, Any] = {
    **TARGET_CONFIG,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "block_size": 16,
    "layer_types": ["full_attention", "full_attention"],
    "is_causal": False,
    # Below the last layer, which is then never computed for a whole prompt.
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 4]},
}
DFLASH2_CONFIG: dict[str, Any] = {
    **DRAFTER_CONFIG,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "mask_token_id": 3,
        "target_layer_ids": [1, 3, 5],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 8,
    },
    # Both drafters fit into the package, and 6 bits accepted as much as 16 (docs/drafters.md).
    "quantization": {"group_size": 64, "bits": 6},
}

TARGET_STEPS = 1500
TARGET_TOKENS = 1536  # of a micro-batch; two make a step
TARGET_RATE = 0.02  # Muon's
TARGET_SEED = 100_000

DRAFTER_STEPS = 1150
OWN_STEPS = 3500
OWN_SHARE = 0.65  # of the conversations of an epoch, half of the tokens; the rest is the corpus


def make_tokenizer(out: Path) -> None:
    """Stage 1: the tokenizer, learnt from 20,000 conversations of the training stream."""
    sample = islice(corpus.conversations(seed=1), 20_000)
    texts = (f"{m['role']}\n{m['content']}" for c in sample for m in c.messages)
    save_tokenizer(train_tokenizer(texts, VOCAB_SIZE), out / "target", CONTEXT)


def epochs(
    tokenizer: TokenizerWrapper, seed: int, count: int = EPOCH
) -> Callable[[int], list[Sample]]:
    """A function from an epoch's number to its samples: `count` new conversations each time."""

    def epoch(e: int) -> list[Sample]:
        fresh = islice(corpus.conversations(seed + e), count)
        return [encode_chat(tokenizer, c.messages) for c in fresh]

    return epoch


def train_target(out: Path, work: Path) -> None:
    """Stage 2: the target."""
    tokenizer = load_tokenizer(out / "target", eos_token_ids=[TARGET_CONFIG["eos_token_id"]])
    samples = epochs(tokenizer, TARGET_SEED)
    model = new_model(TARGET_CONFIG, TARGET_SEED)
    parameters = fit(
        next_token_loss(model),
        model.trainable_parameters(),
        make_optimizer("muon", TARGET_RATE, TARGET_STEPS),
        lambda position: BatchStream(samples, collate, TARGET_TOKENS, TARGET_SEED, position),
        TARGET_STEPS,
        work / "target.safetensors",
        Printer("target", "accuracy"),
        every=100,
    )
    model.update(parameters)
    save_model(model, TARGET_CONFIG, out / "target")


def mixed(target: Target, own_answers: list[Sample]) -> Callable[[int], list[Sample]]:
    """A function from an epoch's number to its samples: the target's own answers, and the corpus.

    Each epoch takes the next OWN_SHARE of its samples from `own_answers`, again from the first one
    after the last; the corpus is new each time.
    """
    count = round(OWN_SHARE * EPOCH)
    fresh = epochs(target.tokenizer, OWN_SEED, EPOCH - count)

    def epoch(e: int) -> list[Sample]:
        turns = islice(cycle(own_answers), e * count % len(own_answers), None)
        return [*islice(turns, count), *fresh(e)]

    return epoch


def train_draft(out: Path, work: Path, name: str, config: dict[str, Any]) -> None:
    """Stage 3: a drafter for the saved target, which learns the corpus, then also its answers."""
    target = load_target(str(out / "target"))
    unquantized = {key: value for key, value in config.items() if key != "quantization"}
    shape = DraftConfig.from_dict(unquantized)
    first = work / f"{name}_corpus"
    if not is_kept(first):
        samples = epochs(target.tokenizer, DRAFTER_SEED)
        checkpoint = work / f"{name}.safetensors"
        drafter = train_on(samples, target, shape, DRAFTER_STEPS, DRAFTER_SEED, checkpoint)
        save_drafter(drafter, unquantized, first)
    samples = mixed(target, own_answers(target, work))
    start = load_drafter(str(first), kernels="off")
    checkpoint = work / f"{name}_own.safetensors"
    drafter = train_on(samples, target, shape, OWN_STEPS, OWN_SEED, checkpoint, start)
    save_drafter(drafter, config, out / name)


def is_kept(folder: Path) -> bool:
    """Whether the folder has a whole drafter (its config is written last); prints it if so."""
    kept = (folder / "config.json").exists()
    if kept:
        say(f"kept as it is: {folder}")
    return kept


def train_on(
    samples: Callable[[int], list[Sample]],
    target: Target,
    shape: DraftConfig,
    steps: int,
    seed: int,
    checkpoint: Path,
    start: DFlash | None = None,
) -> DFlash:
    """A drafter trained on these samples, from random weights or from the drafter `start`."""
    settings = DrafterSettings(
        steps=steps,
        tokens=1024,
        anchors=16,
        learning_rate=0.02,
        optimizer="muon",
        seed=seed,
        every=100,
    )
    return train_drafter(
        target,
        shape,
        samples,
        settings,
        checkpoint=checkpoint,
        progress=Printer(checkpoint.stem, "tau"),
        start=start,
    )


def record(conversation: corpus.Conversation) -> dict[str, Any]:
    """A line of prompts.jsonl: the prompt, or the chat before it too, and the expected answer."""
    *before, answer = conversation.messages
    prompt = {"messages": before} if len(before) > 1 else {"prompt": before[0]["content"]}
    return {"category": conversation.category, **prompt, "answer": answer["content"]}


def write_suite(out: Path) -> None:
    """Stage 4: held-out prompts for bench and tests."""
    lines = (json.dumps(record(c)) for c in corpus.held_out(SUITE_SIZE))
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def score(out: Path, name: str) -> str:
    """Stage 5: a Markdown table of a drafter's scores on prompts it has not seen.

    Strangers' requests have no right answer, so their row has no share of exact ones.
    """
    target = load_target(str(out / "target"))
    drafter = load_drafter(str(out / name))
    scores = evaluate(target, drafter, [record(c) for c in corpus.held_out(SCORED, seed=1)])
    others = [
        {"category": "strangers", "prompt": text, "answer": ""}
        for text in different_requests()[OWN_REQUESTS:]
    ]
    rows = ["| category | prompts | acceptance length | exact answers | drafted = plain |"]
    rows.append("|---|---|---|---|---|")
    shown = {**scores, "**all**": total(scores), **evaluate(target, drafter, others)}
    for category, sums in shown.items():
        exact = f"{sums.exact / sums.prompts:.0%}" if category != "strangers" else "-"
        rows.append(
            f"| {category} | {sums.prompts} | {sums.acceptance_length:.2f} | {exact} |"
            f" {sums.identical / sums.prompts:.0%} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run the stages that are not done yet, then print the scores."""
    parser = argparse.ArgumentParser(description="Train the embedded pair from nothing.")
    parser.add_argument("out", type=Path, help="folder of the pair")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--dflash2", action="store_true", help="a DFlash2 drafter instead")
    options = parser.parse_args()
    out = options.out
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    if not (out / "target" / "tokenizer.json").exists():
        make_tokenizer(out)
    if not (out / "target" / "model.safetensors").exists():
        train_target(out, work)
    name, config = ("dflash2", DFLASH2_CONFIG) if options.dflash2 else ("drafter", DRAFTER_CONFIG)
    if not is_kept(out / name):
        train_draft(out, work, name, config)
    write_suite(out)
    print(score(out, name))


if __name__ == "__main__":
    main()
