"""Has the embedded pair answer its held-out prompts and prints as JSON what that took.

    python pair_worker.py FOLDER

For test_tiny_pair.py. A process of its own, because a BLAS must be chosen before MLX is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dflash_mlx.machine.blas import use_fast_blas

PER_CATEGORY = 9  # prompts whose answers are compared with plain ones; 7 categories make 63


def read_prompts(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record.setdefault("messages", [{"role": "user", "content": record.get("prompt")}])
    return records


def shortest_of_each(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """So many of every category; reading long prompts costs much and shows nothing more."""
    chosen: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: len(json.dumps(record["messages"]))):
        chosen.setdefault(record["category"], []).append(record)
    return [record for records in chosen.values() for record in records[:count]]


def quality(folder: Path) -> list[dict[str, Any]]:
    """Every prompt answered to its end, drafted, and on some of them plainly too."""
    from dflash_mlx.loading.load import load_drafter, load_target
    from dflash_mlx.loop import generate

    target = load_target(str(folder / "target"))
    drafter = load_drafter(str(folder / "drafter"))
    records = read_prompts(folder)
    plainly = shortest_of_each(records, PER_CATEGORY)
    answers = []
    for record in records:
        drafted = generate(target, drafter, record["messages"], max_tokens=256)
        answer = {
            "category": record["category"],
            "exact": drafted.text.strip() == record["answer"].strip(),
            "tokens": drafted.stats.round_tokens,
            "rounds": drafted.stats.rounds,
        }
        if record in plainly:
            plain = generate(target, None, record["messages"], max_tokens=256)
            answer["as plain"] = (plain.tokens, plain.text) == (drafted.tokens, drafted.text)
        answers.append(answer)
    return answers


if __name__ == "__main__":
    use_fast_blas()
    print(json.dumps(quality(Path(sys.argv[1]))))
