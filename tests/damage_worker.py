"""Loads damaged folders and prints how each of them ended; for test_damaged_models.py.

    python damage_worker.py FOLDER FAMILY SEED [SEED ...]

A line of JSON a seed: what was damaged, and "text", "line" (an error of ours, in one line) or what
went wrong. A folder that hangs or crashes ends this process, and the line is missing.
"""

import json
import re
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path

import mlx.core as mx
from damage import MESSAGES, copy_folder, damage, save_family
from mlx_lm.generate import generate_step
from mlx_lm.utils import load as mlx_load

import dflash_mlx as dm
from dflash_mlx.errors import DFlashError

SECONDS, BYTES = 60, 2 * 2**30
TOKENS = 6


def our_text(folder: Path) -> str:
    target = dm.load_target(str(folder))
    prompt = MESSAGES if target.tokenizer.has_chat_template else MESSAGES[0]["content"]
    return dm.generate(target, None, prompt, max_tokens=TOKENS).text


def mlx_lm_text(folder: Path) -> str:
    """What mlx-lm itself says, in f32 as this package computes on a CPU."""
    model, tokenizer = mlx_load(str(folder), tokenizer_config={"trust_remote_code": False})
    model.set_dtype(mx.float32)
    if tokenizer.has_chat_template:
        prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    else:
        prompt = tokenizer.encode(MESSAGES[0]["content"])
    detokenizer = tokenizer.detokenizer
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS):
        if token in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text.rstrip("\ufffd")


def outcome(folder: Path, expected: str) -> str:
    try:
        text = our_text(folder)
    except DFlashError as error:
        message = str(error)
        print(message, file=sys.stderr)
        return "line" if message and message.isprintable() else f"not a line: {message!r}"
    except Exception:  # what this test is about: anything else that comes out is a bug
        return traceback.format_exc()
    if text == expected:
        return "text"
    try:
        theirs = mlx_lm_text(folder)
    except Exception as error:  # mlx-lm refuses what we took
        theirs = f"{type(error).__name__}: {error}"
    return "text" if text == theirs else f"{text!r} instead of {expected!r} or {theirs!r}"


def limit_memory() -> None:
    """From here on, 2 GB more than this process has now; macOS has no such limit."""
    if sys.platform != "linux":
        return
    size = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))


def main(place: Path, family: str, seeds: list[int]) -> None:
    warnings.simplefilter("ignore")
    whole, folder = place / f"{family} whole", place / f"{family} damaged"
    if not whole.exists():
        save_family(whole, family)
    expected = our_text(whole)
    assert expected == mlx_lm_text(whole)
    limit_memory()
    for seed in seeds:
        copy_folder(whole, folder)
        done = damage(folder, family, seed)
        print(json.dumps({"seed": seed, "damage": done}), flush=True)
        signal.alarm(SECONDS)
        ended = outcome(folder, expected)
        signal.alarm(0)
        print(json.dumps({"seed": seed, "outcome": ended}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[3:]])
