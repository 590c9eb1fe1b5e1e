"""Host time of verification, per layer: mlx-lm's own call, ours, ours replayed. Graphs never run.

    taskset -c 1 python scripts/host_time.py [--rows 1,4,16] [--repeats 100]

Models have the published layers, few of them, and weights of zeros; a prompt is in their caches.
MLX's operations that are one node on a GPU and many on a CPU are replaced with one lazy node. Our
launches are real calls of `mx.fast.metal_kernel`, which writes each kernel's text: it needs no
Metal while a function is traced for export. Prints microseconds, graph nodes and launches (nodes
that are not views) of a layer, and of a whole verification at the published depth.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from experiment import VIEWS, graph_nodes, numbers, options_of
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target
from dflash_mlx.targets.internals import classes_of

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "target_configs.json"
PROMPT = 200  # tokens in the caches
CONSTANTS = {"Full"}  # they stay from step to step
QWEN3 = json.loads(CONFIGS.read_text())["Qwen3-8B"] | {"vocab_size": 1024}
QWEN35 = QWEN3 | {
    "model_type": "qwen3_5",
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 0,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "sliding_window": 128,
    "rope_theta": 150000,
    "rope_scaling": None,
}
# The config, a period of layers, and how many the model has.
MODELS = {
    "Qwen3-8B": (QWEN3, 1, 36),
    "Qwen3.5-9B": (QWEN35, 4, 32),
    "gpt-oss-20b": (GPT_OSS, 2, 24),
}


def stand_in(**_: Any) -> Any:
    """A kernel factory: a launch is one lazy node that depends on the inputs."""
    results: dict[Any, list[mx.array]] = {}

    def launch(inputs: list[mx.array], grid: Any, output_shapes: Any, **given: Any) -> Any:
        key = grid, *map(tuple, output_shapes)
        if key not in results:
            shapes = zip(output_shapes, given["output_dtypes"], strict=True)
            results[key] = [mx.zeros(*one) for one in shapes]
            mx.eval(results[key])
        return mx.depends(results[key], inputs)

    return launch


class Either:
    """A kernel factory: it launches MLX's own kernels while `real`, and otherwise stand-ins."""

    real = False

    def __call__(self, **definition: Any) -> Any:
        own = mx.fast.metal_kernel(**definition)
        other = stand_in(**definition)
        return lambda **call: (own if self.real else other)(**call)


def one_node(like: mx.array, *others: Any, **_: Any) -> mx.array:
    """A result of the shape of the first argument, which depends on all arrays among them."""
    [result] = mx.depends([like], [one for one in others if isinstance(one, mx.array)])
    return result


def one_delta_node(q: mx.array, k: mx.array, v: mx.array, *others: Any) -> list[mx.array]:
    """Results of mlx-lm's delta rule, which is one kernel on a GPU."""
    return mx.depends([v, others[2]], [q, k, *(one for one in others if one is not None)])


def on_a_gpu() -> ExitStack:
    """Have norms, rotations, attention and mlx-lm's delta rule be one node each."""
    stack = ExitStack()
    stack.enter_context(patch.object(gated_delta, "gated_delta_ops", one_delta_node))
    for name in ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention"):
        stack.enter_context(patch.object(mx.fast, name, one_node))
    return stack


class OwnCall:
    """mlx-lm's own call of a model, after a prompt."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.caches = make_prompt_cache(model)
        with on_a_gpu():
            model(mx.zeros((1, PROMPT), mx.int32), cache=self.caches)
        self.saved = contents_of(self.caches)

    def build(self, rows: int) -> tuple[float, mx.array]:
        """Seconds that the host takes to build a verification, and its lazy logits."""
        restore(self.caches, self.saved)
        with on_a_gpu():
            start = time.perf_counter()
            logits = self.model(mx.array([[7] * rows]), cache=self.caches)
            return time.perf_counter() - start, logits


class OurVerify:
    """Our verify of a model, after a prompt; from its trace if it is `replayed`."""

    def __init__(self, target: Target, replayed: bool) -> None:
        self.target = target
        self.why_not = None if replayed else "this side builds each graph"
        session = target.start()
        with on_a_gpu():
            session.dry_run(PROMPT)
        self.saved = contents_of(session.cache)

    def build(self, rows: int) -> tuple[float, mx.array]:
        """Seconds that the host takes to build a verification, and its lazy logits."""
        self.target.steps.why_not = self.why_not
        session = self.target.start()
        restore(session.cache, self.saved)
        session.position = PROMPT
        proposal = Proposal([7] * rows)
        with on_a_gpu():
            start = time.perf_counter()
            logits, _ = session.verify(proposal)
            seconds = time.perf_counter() - start
        if self.target.steps.why_not != self.why_not:
            raise RuntimeError(self.target.steps.why_not)
        return seconds, logits


def contents_of(caches: Sequence[Any]) -> list[dict[str, Any]]:
    """What caches hold, in arrays of zeros."""

    def zeros(x: Any) -> Any:
        return mx.zeros(x.shape, x.dtype) if isinstance(x, mx.array) else x

    held = [tree_map(zeros, vars(cache)) for cache in caches]
    mx.eval([x for _, x in tree_flatten(held) if isinstance(x, mx.array)])
    return held


def restore(caches: Sequence[Any], saved: Sequence[dict[str, Any]]) -> None:
    """Have caches hold this, in arrays of their own, which they write into."""
    for cache, held in zip(caches, saved, strict=True):
        own = tree_map(lambda x: x[...] if isinstance(x, mx.array) else x, held)
        vars(cache).update(own)


def model_of(config: dict[str, Any], layers: int) -> nn.Module:
    """A model in 4 bits."""
    model_class, arguments = classes_of(config)
    model = model_class(arguments.from_dict(config | {"num_hidden_layers": layers}))
    model.set_dtype(mx.bfloat16)
    Quantization(4, 64).apply(model)
    model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))
    return model


def target_of(config: dict[str, Any], layers: int, factory: Either) -> Target:
    """A model on our kernels."""
    config = config | {"num_hidden_layers": layers}
    model = model_of(config, layers)
    # As where every product and attention of this many rows was chosen to be ours.
    kernel_plan = swap_layers(model, config=config, kernels=Kernels(factory), rows={}, exact=True)
    tokenizer = type("Tokenizer", (), {"eos_token_ids": (), "has_chat_template": False})()
    return Target(model, tokenizer=tokenizer, config=config, name="host", kernel_plan=kernel_plan)


def fastest(
    sides: dict[str, list[Any]], kernels: Either, rows: int, repeats: int
) -> dict[str, list[float]]:
    """The shortest host time, in seconds, of each side's verifications, which take turns.

    They are timed inside of a function that MLX traces for export, because MLX's own kernels then
    need no Metal. What is exported does not matter.
    """
    best = {name: [math.inf] * len(verifies) for name, verifies in sides.items()}

    def traced(x: mx.array) -> mx.array:
        for _ in range(repeats):
            for name, verifies in sides.items():
                for number, verify in enumerate(verifies):
                    seconds, _ = verify.build(rows)
                    best[name][number] = min(best[name][number], seconds)
        return x + 1

    kernels.real = True
    with tempfile.TemporaryDirectory() as folder:
        mx.export_function(str(Path(folder) / "traced.mlxfn"), traced, mx.zeros(4))
    kernels.real = False
    return best


def main() -> None:
    """See the module's docstring."""
    args = options_of(__doc__, rows="1,4,16", repeats=100)
    for name, (config, period, depth) in MODELS.items():
        kernels = Either()
        models = [model_of(config, n * period) for n in (1, 2)]
        targets = [target_of(config, n * period, kernels) for n in (1, 2)]
        mx.eval([model.parameters() for model in models], [t.model.parameters() for t in targets])
        sides: dict[str, list[Any]] = {
            "mlx-lm": [OwnCall(model) for model in models],
            "ours": [OurVerify(target, replayed=False) for target in targets],
            "replayed": [OurVerify(target, replayed=True) for target in targets],
        }
        for rows in numbers(args.rows):
            report(f"{name:12} {rows:2} rows", sides, kernels, rows, args.repeats, depth / period)


def report(
    title: str,
    sides: dict[str, list[Any]],
    kernels: Either,
    rows: int,
    repeats: int,
    periods: float,
) -> None:
    """Print the figures of each side, a verification's at so many periods of layers."""
    best = fastest(sides, kernels=kernels, rows=rows, repeats=repeats)
    # Models of one and of two periods: their difference is the cost of a period of layers.
    [stock, *_] = [more - less for less, more in best.values()]
    for side, verifies in sides.items():
        less, more = best[side]
        fewer, nodes = (graph_nodes(verify.build(rows)[1]) for verify in verifies)
        added = nodes - fewer
        launches = sum(n for kind, n in added.items() if kind not in VIEWS | CONSTANTS)
        print(
            f"{title} {side:8} {1e3 * (more - less) * periods:6.2f} ms per verification, "
            f"{(more - less) / stock:.2f} of mlx-lm's; {added.total() * periods:.0f} nodes, "
            f"{launches * periods:.0f} launches",
            flush=True,
        )


if __name__ == "__main__":
    main()
