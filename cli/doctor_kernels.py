"""`dflash-mlx doctor --kernels`: checks of our kernels that need a Mac, in at most five minutes.

It compiles every instance of every kernel and compares it with its reference, compares rows of
small models with the same rows one by one, times layers of published models against MLX's kernels,
and samples memory during a long answer. One file holds all results.
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
from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.kernels.selfcheck import KernelCheckFailed
from dflash_mlx.kernels.weights import AffineWeights
from dflash_mlx.loading.kernel_plan import check_rows, time_kernels
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.machine.blas import use_fast_blas
from dflash_mlx.machine.facts import GB, machine
from dflash_mlx.targets import Target

from .output import note, waiting

FILE = Path("dflash-mlx-kernels.json")
WHERE = "the project's issues (template 'Results from a Mac')"
CHECK_SECONDS = 200.0  # for checking instances
TUNING_SECONDS = 30.0  # for timing a model
TOKENS = 2000  # of the long answer
TOKENS_PER_SAMPLE = 100  # how often memory is sampled
CALLS = 4  # of a product in one timing
# (N, K) of 4-bit layers of Qwen3-8B, Qwen3.5-9B, Qwen3.6-27B and gpt-oss-20b.
SHAPES = ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (17408, 5120), (2880, 4096))
# The configuration that all small models share.
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
# Family -> the module of mlx-lm, and what its configuration adds to `SMALL`.
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
    """Check every instance while there is time. Returns how many were checked, and how many not.

    Failures are in `kernels.checks.failed` afterwards.
    """
    kernels.checks.passed = set()
    start = time.perf_counter()
    calls = list(kernels.instances())
    checked = 0
    for call in calls:
        if time.perf_counter() - start > seconds:
            break
        try:
            mx.eval(call())
        except KernelCheckFailed:
            pass  # already in `checks.failed`
        except KernelError as error:
            message = str(error.args[0])
            kernels.checks.failed.setdefault(message, message)
        checked += 1
    return checked, len(calls) - checked


def check_families(metal_kernel: KernelFactory) -> dict[str, str]:
    """Check that verified rows equal the same rows alone, in small 4-bit models of each family.

    All layers run on our kernels. Returns the errors by family.
    """
    errors = {}
    for family, (module, changes) in FAMILIES.items():
        config = SMALL | changes | {"model_type": family}
        mx.random.seed(0)
        arguments = module.ModelArgs.from_dict(config | {"text_config": config})
        model = module.Model(arguments)
        model.set_dtype(mx.bfloat16)
        Quantization(4, 32, "affine").apply(model)
        tokenizer = type("Tokenizer", (), {"eos_token_ids": (), "has_chat_template": False})()
        try:
            kernel_plan = swap_layers(model, config, Kernels(metal_kernel), {}, exact=True)
            target = Target(model, tokenizer, config=config, name=family, kernel_plan=kernel_plan)
            check_rows(target)
        except (KernelError, RuntimeError) as error:
            errors[family] = str(error.args[0])
    return errors


def time_shapes(kernels: Kernels) -> dict[str, list[float]]:
    """Time MLX's quantized product and ours. Returns milliseconds by shape and rows."""
    milliseconds = {}
    for (columns, depth), rows in product(SHAPES, (4, 16)):
        values = mx.random.normal((columns, depth), key=mx.random.key(1)).astype(mx.bfloat16)
        weights = AffineWeights(*mx.quantize(values, group_size=64, bits=4), 4, 64)
        x = mx.ones((rows, depth), mx.bfloat16)
        stock = partial(
            mx.quantized_matmul,
            x,
            weights.words,
            scales=weights.scales,
            biases=weights.biases,
            transpose=True,
            group_size=64,
            bits=4,
        )
        ours = partial(kernels.product, x, weights)
        times = Stopwatch(repeats=5).both(partial(_repeat, stock), partial(_repeat, ours))
        if times is not None:
            milliseconds[f"{rows} rows by {columns}x{depth}"] = [
                1e3 * seconds / CALLS for seconds in times
            ]
    return milliseconds


def _repeat(call: Callable[[], Any]) -> list[Any]:
    """Make several calls, so that waiting for the device counts less."""
    return [call() for _ in range(CALLS)]


def sample_memory(model: str) -> list[list[float]]:
    """Generate a long answer, and sample GB in use and GB of freed buffers that MLX keeps."""
    target, drafter = dflash_mlx.load(model)
    samples: list[list[float]] = []
    tokens = 0
    for event in dflash_mlx.stream_generate(target, drafter, "Count from 1.", max_tokens=TOKENS):
        tokens += len(event.tokens)
        if tokens >= TOKENS_PER_SAMPLE * (len(samples) + 1):
            samples.append([mx.get_active_memory() / GB, mx.get_cache_memory() / GB])
    return samples


def report(model: str | None, file: Path = FILE) -> bool:
    """Run all checks, write the results, and print three lines. Returns whether all passed."""
    if not mx.metal.is_available():
        note(
            "doctor --kernels needs a Mac: without Metal it cannot compile our kernels, compare "
            "them with their references, or time them. Nothing was checked."
        )
        return False
    start = time.perf_counter()
    kernels = Kernels(mx.fast.metal_kernel)
    content: dict[str, Any] = {"machine": machine(use_fast_blas())}
    content["tensor units"] = kernels.tensor_units
    with warnings.catch_warnings(), waiting("Compiling and checking every kernel"):
        warnings.simplefilter("ignore")
        checked, not_reached = check_instances(kernels, CHECK_SECONDS)
        content["checked"] = checked
        content["not reached"] = not_reached
        content["seconds of compiling and checking"] = time.perf_counter() - start
        failures = kernels.checks.failed | check_families(mx.fast.metal_kernel)
        content["failures"] = failures
        milliseconds = time_shapes(kernels)
        content["milliseconds, MLX and ours"] = milliseconds
    if model is not None:
        with waiting(f"Timing verification forwards of {model}"):
            target = dflash_mlx.load_target(model, kernels="off")
            _, timings = time_kernels(target, Kernels(), Stopwatch(TUNING_SECONDS, 3))
            content["verifies"] = [
                [timing.key, dict(timing.stock), dict(timing.ours)] for timing in timings
            ]
    with waiting("Sampling memory"):
        content["memory"] = sample_memory(model or "tiny")
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    slower = [shape for shape, (mlx, ours) in milliseconds.items() if ours > mlx]
    verdict = f"{len(failures)} wrong"
    if failures:
        verdict += f": {', '.join(failures)}"
    note(f"{checked} calls checked, {not_reached} not reached, {verdict}")
    note(f"Slower than MLX's: {', '.join(slower) or 'none of those timed'}")
    note(f"Please send {file} to {WHERE}.")
    return not failures
