"""Runs a pair on its held-out prompts and prints what came out as JSON; for test_tiny_pair.py.

    python pair_worker.py FOLDER identity BITS    who says something else than mlx-lm, of everyone
    python pair_worker.py FOLDER quality          whole answers, and what drafting them took

A process of its own, because a BLAS must be chosen before MLX is imported and because four of
them share the cores better than one. The identity is measured on MLX's own BLAS, whose sums do not
depend on the number of rows; the quality on the fast one, as people run it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dflash_mlx.machine.blas import use_fast_blas

PER_CATEGORY = 9  # prompts compared with mlx-lm; 7 categories make 63
FIRST_TOKENS = 20  # of each answer compared with mlx-lm
# What drafts, and how wide: no wider than it is right, or the test would mostly wait.
ORACLES = {0.0: 3, 0.5: 4, 0.9: 10, 1.0: 16}


def read_prompts(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record.setdefault("messages", [{"role": "user", "content": record.get("prompt")}])
    return records


def first_of_each(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    chosen: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        chosen.setdefault(record["category"], []).append(record)
    return [record for records in chosen.values() for record in records[:count]]


def identity(folder: Path, bits: int | None) -> dict[str, Any]:
    """Every contestant on the same prompts; `wrong` names each that left mlx-lm's tokens."""
    from oracle import Oracle
    from tinymodels import greedy

    from dflash_mlx.loading.load import load_drafter, load_target
    from dflash_mlx.loop import generate

    target = load_target(str(folder / "target"), bits=bits)
    drafter = load_drafter(str(folder / "drafter"), bits=bits)
    records = first_of_each(read_prompts(folder), PER_CATEGORY)
    wrong, compared = [], 0
    for number, record in enumerate(records):
        prompt = target.tokenizer.apply_chat_template(
            record["messages"], add_generation_prompt=True
        )
        answer = greedy(target, prompt, FIRST_TOKENS)
        contestants: dict[str, tuple[Any, int | None]] = {"plain": (None, None)}
        contestants["trained"] = (drafter, None)
        for p, width in ORACLES.items():
            oracle = Oracle(prompt, answer, target.vocab_size, p, seed=number)
            contestants[f"oracle {p}"] = (oracle, width)
        for name, (contestant, width) in contestants.items():
            result = generate(target, contestant, prompt, max_tokens=FIRST_TOKENS, block_size=width)
            compared += 1
            if result.tokens != answer:
                wrong.append({"who": name, "prompt": record["messages"], "number": number})
    return {"prompts": len(records), "compared": compared, "wrong": wrong}


def quality(folder: Path) -> list[dict[str, Any]]:
    """Every prompt answered to its end, drafted, and on some of them plainly too."""
    from dflash_mlx.loading.load import load_drafter, load_target
    from dflash_mlx.loop import generate

    target = load_target(str(folder / "target"))
    drafter = load_drafter(str(folder / "drafter"))
    records = read_prompts(folder)
    plainly = first_of_each(records, PER_CATEGORY)
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


def main() -> None:
    folder, task, *bits = Path(sys.argv[1]), *sys.argv[2:]
    use_fast_blas(stock=task == "identity")
    if task == "identity":
        print(json.dumps(identity(folder, int(bits[0]) or None)))
    else:
        print(json.dumps(quality(folder)))


if __name__ == "__main__":
    main()
