"""`dflash-mlx doctor --kernels`: what only a Mac can tell of our kernels, in at most five minutes.

Every library is compiled in every instance and compared with its reference, rows of small models
are held against the same rows one by one, layers of published models are timed against MLX's, and
memory is sampled over a long answer. One file holds it all.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt_oss, qwen3, qwen3_5, qwen3_moe

import dflash_mlx
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.autotune import Stopwatch
from dflash_mlx.kernels.launcher import KernelFactory
from dflash_mlx.kernels.modules import Kernels, wire
from dflash_mlx.kernels.selfcheck import UnprovenError
from dflash_mlx.kernels.weights import AffineWeights
from dflash_mlx.loading.kernel_plan import check_rows, time_kernels
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.machine.blas import use_fast_blas
from dflash_mlx.machine.facts import GB, machine
from dflash_mlx.targets import Target

from .output import note, waiting

FILE = Path("dflash-mlx-kernels.json")
WHERE = "the project's issues (template 'Results from a Mac')"
SECONDS, TUNING = 200.0, 30.0  # of checking instances; of timing a model
TOKENS, SAMPLE = 2000, 100  # of the long answer; how often memory is read
# N and K of 4-bit layers of Qwen3-8B, Qwen3.5-9B, Qwen3.6-27B and gpt-oss-20b.
SHAPES = ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (17408, 5120), (2880, 4096))
SMALL = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=512, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
HYBRID = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=4,
    partial_rotary_factor=0.25,
)  # fmt: skip
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (qwen3, {}),
    "qwen3_moe": (
        qwen3_moe,
        MOE | {"num_experts": 8, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "qwen3_5": (qwen3_5, HYBRID | {"num_experts": 0}),
    "gpt_oss": (gpt_oss, {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}),
}


def check_instances(kernels: Kernels, seconds: float) -> tuple[int, int]:
    """Check every instance while there is time: how many were, and how many are left.

    What fails is in `kernels.proofs.broken` afterwards.
    """
    kernels.proofs.proven, start = set(), time.perf_counter()
    calls, checked = list(kernels.instances()), 0
    for call in calls:
        if time.perf_counter() - start > seconds:
            break
        try:
            mx.eval(call())
        except UnprovenError:
            pass  # among the broken
        except KernelError as error:
            kernels.proofs.broken.setdefault(str(error.args[0]), str(error.args[0]))
        checked += 1
    return checked, len(calls) - checked


def check_families(metal_kernel: KernelFactory) -> dict[str, str]:
    """Small random models, 4-bit, all on our kernels: rows of a verify are the rows alone."""
    wrong = {}
    for family, (module, changes) in FAMILIES.items():
        config = SMALL | changes | {"model_type": family}
        mx.random.seed(0)
        arguments = module.ModelArgs.from_dict(config | {"text_config": config})
        model = module.Model(arguments)
        model.set_dtype(mx.bfloat16)
        Quantization(4, 32, "affine").apply(model)
        tokenizer = type("Tokenizer", (), {"eos_token_ids": (), "has_chat_template": False})()
        try:
            wiring = wire(model, config, Kernels(metal_kernel), {}, exact=True)
            check_rows(Target(model, tokenizer, config, family, wiring))
        except (KernelError, RuntimeError) as error:
            wrong[family] = str(error.args[0])
    return wrong


def time_shapes(kernels: Kernels) -> dict[str, list[float]]:
    """Milliseconds of MLX's product and of ours, by shape and rows."""
    found = {}
    for (columns, depth), rows in product(SHAPES, (4, 16)):
        values = mx.random.normal((columns, depth), key=mx.random.key(1)).astype(mx.bfloat16)
        w = AffineWeights(*mx.quantize(values, group_size=64, bits=4), 4, 64)
        x = mx.ones((rows, depth), mx.bfloat16)
        stock = partial(mx.quantized_matmul, x, w.words, w.scales, w.biases, True, 64, 4)
        ours = partial(kernels.product, x, w)
        taken = Stopwatch(repeats=5).both(partial(_four, stock), partial(_four, ours))
        if taken is not None:
            found[f"{rows} rows by {columns}x{depth}"] = [250 * seconds for seconds in taken]
    return found


def _four(call: Callable[[], Any]) -> list[Any]:
    """Several calls, or waiting for the device would be timed."""
    return [call() for _ in range(4)]


def sample_memory(model: str) -> list[list[float]]:
    """GB in use and GB of freed buffers that MLX keeps, every 100 tokens of a long answer."""
    target, drafter = dflash_mlx.load(model)
    samples: list[list[float]] = []
    tokens = 0
    for event in dflash_mlx.stream_generate(target, drafter, "Count from 1.", max_tokens=TOKENS):
        tokens += len(event.tokens)
        if tokens >= SAMPLE * (len(samples) + 1):
            samples.append([mx.get_active_memory() / GB, mx.get_cache_memory() / GB])
    return samples


def report(model: str | None, file: Path = FILE) -> bool:
    """Check, time and write everything; say it in three lines. Whether all is right."""
    if not mx.metal.is_available():
        note(
            "doctor --kernels needs a Mac: without Metal it cannot compile our kernels, compare "
            "them with their references, or time them. Nothing was checked."
        )
        return False
    start, kernels = time.perf_counter(), Kernels(mx.fast.metal_kernel)
    content: dict[str, Any] = {"machine": machine(use_fast_blas())}
    content["tensor units"] = kernels.tensor_units
    with warnings.catch_warnings(), waiting("Compiling and checking every kernel"):
        warnings.simplefilter("ignore")
        checked, left = check_instances(kernels, SECONDS)
        content |= {"checked": checked, "not reached": left}
        content["seconds of compiling and checking"] = time.perf_counter() - start
        content["failures"] = kernels.proofs.broken | check_families(mx.fast.metal_kernel)
        content["milliseconds, MLX and ours"] = timed = time_shapes(kernels)
    if model is not None:
        with waiting(f"Timing verifies of {model}"):
            target = dflash_mlx.load_target(model, kernels="off")
            _, timings = time_kernels(target, Kernels(), Stopwatch(TUNING, 3))
            content["verifies"] = [[one.key, dict(one.stock), dict(one.ours)] for one in timings]
    with waiting("Sampling memory"):
        content["memory"] = sample_memory(model or "tiny")
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    failures = content["failures"]
    slower = [key for key, (mlx, ours) in timed.items() if ours > mlx]
    wrong = f"{len(failures)} wrong{': ' * bool(failures)}{', '.join(failures)}"
    note(f"{checked} calls checked, {left} not reached, {wrong}")
    note(f"Slower than MLX's: {', '.join(slower) or 'none of those timed'}")
    note(f"Please send {file} to {WHERE}.")
    return not failures
