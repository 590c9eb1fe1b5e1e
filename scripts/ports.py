"""Our decoding beside mlx-lm's and other ports of DFlash, on equal ground: one core of a CPU.

    python scripts/ports.py --core 1 [--prompts 20] [--max-tokens 96] [--turns 5]
    python scripts/ports.py --core 1 --as-installed

Installs each port, without its dependencies, into a temporary folder: all of them run on the MLX
and mlx-lm that are installed here, on our matrix products, and with the embedded pair in float32.
Linux's policy SCHED_BATCH, which `dflash_mlx.load` sets for its own process, is set for all;
with `--as-installed` only for ours. Each system has a process, and they take turns. The time of an
answer is its CPU seconds less those of an answer of one token, which is the prompt's time. Prints
tokens per second, ours over theirs (medians over the turns), and how many texts differ from ours.

mlx-vlm is left out: its Qwen3 does not hand out hidden states, so its drafter cannot run.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from experiment import Worker, embedded_ids, in_turns, options_of

Decode = Callable[[list[int], int], list[int]]  # (prompt, most new tokens) -> new tokens
PLAIN = "ours, plain"
BLOCKS = "ours, full blocks"
MLX_LM = "mlx-lm"


def main() -> None:
    """Measure and print, or answer the questions of the process that does."""
    options = options_of(
        __doc__,
        prompts=20,
        max_tokens=96,
        turns=5,
        as_installed=False,
        worker="",
        pair="",
        blas="",
    )
    if options.worker:
        if sys.platform == "linux":
            # Without this, a worker would inherit the policy of the process that measures.
            policy = os.SCHED_OTHER if options.as_installed else os.SCHED_BATCH
            os.sched_setscheduler(0, policy, os.sched_param(0))
        answer(options.worker, Path(options.pair), options.blas)
        return
    import dflash_mlx as dm

    blas = dm.use_fast_blas()
    target = dm.load_target("tiny")
    ends = set(target.tokenizer.eos_token_ids)
    all_prompts = embedded_ids(target)
    stride = max(1, len(all_prompts) // options.prompts)
    prompts = all_prompts[::stride][: options.prompts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("target", "drafter"):
            save_float32(part, folder)
        workers = {}
        for system in SYSTEMS:
            packages = folder / system
            packages.mkdir()
            if system in PORTS:
                install(PORTS[system], packages)
            workers[system] = Worker(system, packages, pair=str(folder), blas=blas.path or "")
        methods = {
            system: partial(worker.ask, prompts=prompts, max_tokens=options.max_tokens)
            for system, worker in workers.items()
        }
        report(in_turns(methods, 1 + options.turns), ends)
        for worker in workers.values():
            worker.process.kill()


def save_float32(part: str, folder: Path) -> None:
    """Copy the target or drafter of the embedded pair, with weights in float32."""
    import mlx.core as mx

    copy = folder / part
    shutil.copytree(str(files("dflash_mlx").joinpath("tiny", part)), copy)
    config = json.loads((copy / "config.json").read_text())
    config["torch_dtype"] = "float32"
    (copy / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(copy / "model.safetensors"))
    arrays = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.eval(arrays)  # reads the file, which is then overwritten
    mx.save_safetensors(str(copy / "model.safetensors"), arrays, metadata={"format": "mlx"})


def install(requirements: list[str], folder: Path) -> None:
    """Install packages without their dependencies into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), *requirements], check=True)


def report(runs: dict[str, list[dict[str, Any]]], ends: set[int]) -> None:
    """Print each system's figures; the first turn warms up.

    Args:
        runs: the replies of `answer`, turn by turn, of each system.
        ends: end tokens, which some systems return and others do not.
    """
    speeds = {}
    texts = {}
    for system, turns in runs.items():
        texts[system] = [
            [token for token in text if token not in ends] for text in turns[-1]["texts"]
        ]
        tokens = sum(len(text) - 1 for text in texts[system])  # the first is the prompt's
        speeds[system] = [tokens / turn["seconds"] for turn in turns[1:]]
    print(f"{'':20}{'tokens/s':>9}{PLAIN:>16}{BLOCKS:>20}{'other texts':>14}")
    for system, rates in speeds.items():
        plain, blocks = (
            median(ours / theirs for ours, theirs in zip(speeds[our_method], rates, strict=True))
            for our_method in (PLAIN, BLOCKS)
        )
        different = sum(
            text != ours for text, ours in zip(texts[system], texts[PLAIN], strict=True)
        )
        print(f"{system:20}{median(rates):9.0f}{plain:16.2f}{blocks:20.2f}{different:14}")


# In a worker


def answer(system: str, pair: Path, blas: str) -> None:
    """Decode the prompts of each line of JSON on stdin, until it ends.

    Replies with the CPU seconds of all answers without their prompts, and the answers' token ids.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    if blas:
        ctypes.CDLL(blas, mode=ctypes.RTLD_GLOBAL)
    # Ports may print while they load and decode.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decode = SYSTEMS[system](str(pair / "target"), str(pair / "drafter"))
    for line in sys.stdin:
        question = json.loads(line)
        max_tokens = question["max_tokens"]
        seconds = 0.0
        texts = []
        for prompt in question["prompts"]:
            start = time.process_time()
            decode(prompt, 1)
            begin = time.process_time()
            texts.append(decode(prompt, max_tokens))
            prompt_seconds = begin - start
            seconds += time.process_time() - begin - prompt_seconds
        print(json.dumps({"seconds": seconds, "texts": texts}), file=replies, flush=True)


def ours(target: str, drafter: str, drafts: bool) -> Decode:
    """This package's decoding, in full blocks if it `drafts`, otherwise plain."""
    import dflash_mlx as dm

    model, network = dm.load(target, drafter)
    used_drafter = network if drafts else None

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        return dm.generate(model, used_drafter, prompt, max_tokens=max_tokens).tokens

    return decode


def mlx_lm(target: str, _: str) -> Decode:
    """mlx-lm's plain decoding."""
    from mlx_lm import load, stream_generate

    model, tokenizer, *_ = load(target)

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        pieces = stream_generate(model, tokenizer, prompt, max_tokens=max_tokens)
        return [int(piece.token) for piece in pieces]

    return decode


def z_lab(target: str, drafter: str) -> Decode:
    """The MLX port of DFlash's authors."""
    from dflash import model_mlx

    # Its loader takes a folder only through the hub's client, which refuses paths.
    model_mlx.snapshot_download = lambda folder, **_: folder
    model, tokenizer = model_mlx.load(target)
    draft = model_mlx.load_draft(drafter)

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        pieces = model_mlx.stream_generate(model, draft, tokenizer, prompt, max_tokens=max_tokens)
        return [token for piece in pieces for token in piece.tokens]

    return decode


def bstnxbt(target: str, drafter: str) -> Decode:
    """bstnxbt's port, whose package has the name of ours and is found before it."""
    from dflash_mlx import runtime
    from dflash_mlx.engine.events import TokenEvent
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    context = build_offline_runtime_context()
    bundle = load_runtime_bundle(model_ref=target, draft_ref=drafter, verify_config=context.verify)
    ends = runtime.get_stop_token_ids(bundle.tokenizer)

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        events = runtime.stream_dflash_generate(
            target_model=bundle.target_model,
            target_ops=bundle.target_ops,
            tokenizer=bundle.tokenizer,
            draft_model=bundle.draft_model,
            draft_backend=bundle.draft_backend,
            prompt_tokens_override=prompt,
            max_new_tokens=max_tokens,
            stop_token_ids=ends,
            runtime_context=context,
        )
        return [event.token_id for event in events if isinstance(event, TokenEvent)]

    return decode


def mlx_dspark(target: str, drafter: str) -> Decode:
    """mlx-dspark's port."""
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    model, tokenizer = load_target(target, require_tap=True)
    network, _ = load_dflash(drafter, quantize=False)

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        done = dflash_generate(
            model, tokenizer, network, prompt_ids=prompt, max_new_tokens=max_tokens
        )
        return [int(token) for token in done.token_ids]

    return decode


PORTS = {
    "z-lab": ["dflash==0.1.0"],
    "bstnxbt": ["dflash-mlx==0.1.8"],
    "mlx-dspark": ["mlx-dspark==0.20.3", "mlx-vlm==0.7.10", "pillow"],
}
SYSTEMS: dict[str, Callable[[str, str], Decode]] = {
    PLAIN: partial(ours, drafts=False),
    BLOCKS: partial(ours, drafts=True),
    MLX_LM: mlx_lm,
    "z-lab": z_lab,
    "bstnxbt": bstnxbt,
    "mlx-dspark": mlx_dspark,
}


if __name__ == "__main__":
    main()
