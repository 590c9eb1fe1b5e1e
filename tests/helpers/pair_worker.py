"""Answer the embedded pair's held-out prompts, and print tokens, steps and correctness as JSON.

    python pair_worker.py FOLDER

test_tiny_pair.py runs it as a new process, because a BLAS must be chosen before MLX is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dflash_mlx.machine.blas import use_fast_blas

PER_CATEGORY = 10  # prompts of each of 7 categories


def read_prompts(folder: Path) -> list[dict[str, Any]]:
    """The records of the held-out prompts, each with its messages."""
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record.setdefault("messages", [{"role": "user", "content": record.get("prompt")}])
    return records


def shortest_of_each(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The `count` shortest prompts of every category: reading longer ones only takes longer."""
    chosen: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: len(json.dumps(record["messages"]))):
        chosen.setdefault(record["category"], []).append(record)
    return [record for records in chosen.values() for record in records[:count]]


def quality(folder: Path) -> list[dict[str, Any]]:
    """Complete answers with the drafter, compared with those that mlx-lm gives in one batch."""
    from mlx_lm.generate import batch_generate

    from dflash_mlx.loading.load import load_drafter, load_target
    from dflash_mlx.loop import generate

    target = load_target(str(folder / "target"))
    drafter = load_drafter(str(folder / "drafter"))
    records = shortest_of_each(read_prompts(folder), PER_CATEGORY)
    tokenizer = target.tokenizer
    ids = [
        tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)
        for record in records
    ]
    generated = batch_generate(target.model, tokenizer, ids, max_tokens=256, return_token_ids=True)
    answers = []
    for record, prompt, plain in zip(records, ids, generated.token_ids, strict=True):
        drafted = generate(target, drafter, prompt, max_tokens=256)
        ends = [token for token in drafted.tokens[-1:] if token in tokenizer.eos_token_ids]
        answer = {
            "category": record["category"],
            "exact": drafted.text.strip() == record["answer"].strip(),
            "as mlx-lm's": drafted.tokens == [*plain, *ends],
            "tokens": drafted.stats.round_tokens,
            "rounds": drafted.stats.rounds,
        }
        answers.append(answer)
    return answers


if __name__ == "__main__":
    use_fast_blas()
    print(json.dumps(quality(Path(sys.argv[1]))))
