"""Host time of a verify, per layer: MLX's own layers against ours, graphs built and never run.

    taskset -c 1 python scripts/host_time.py [--rows 16] [--repeats 300]

Models have the published layers, few of them, and weights of zeros. MLX's operations that are one
node on a GPU and many on a CPU are stood in for by one lazy node. Our launches are real calls of
`mx.fast.metal_kernel`, which writes each kernel's text: it needs no Metal while a function is
traced for export. Prints microseconds, graph nodes and launches (nodes that are not views) of a
layer, and of a whole verify at the published depth.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from experiment import VIEWS, graph_nodes, options_of
from mlx.utils import tree_map
from mlx_lm.models import gated_delta

from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target
from dflash_mlx.targets.internals import classes_of

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "target_configs.json"
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
            results[key] = [mx.zeros(*shape) for shape in shapes]
            mx.eval(results[key])
        return mx.depends(results[key], inputs)

    return launch


class Either:
    """A kernel factory whose kernels are MLX's own while `real`, and else stood in for."""

    real = False

    def __call__(self, **definition: Any) -> Any:
        mlx_kernel = mx.fast.metal_kernel(**definition)
        other = stand_in(**definition)
        return lambda **call: (mlx_kernel if self.real else other)(**call)


def one_node(like: mx.array, *others: Any, **_: Any) -> mx.array:
    """A result of the shape of the first argument, which depends on all arrays among them."""
    arrays = [other for other in others if isinstance(other, mx.array)]
    [result] = mx.depends([like], arrays)
    return result


def one_delta_node(q: mx.array, k: mx.array, v: mx.array, *others: Any) -> list[mx.array]:
    """Results of mlx-lm's delta rule, which is one kernel on a GPU."""
    arrays = [other for other in others if other is not None]
    return mx.depends([v, others[2]], [q, k, *arrays])


def on_a_gpu() -> ExitStack:
    """Have norms, rotations, attention and mlx-lm's delta rule be one node each."""
    stack = ExitStack()
    stack.enter_context(patch.object(gated_delta, "gated_delta_ops", one_delta_node))
    for name in ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention"):
        stack.enter_context(patch.object(mx.fast, name, one_node))
    return stack


def target_of(config: dict[str, Any], layers: int, factory: Either | None) -> Target:
    """A model in 4 bits, on our kernels if there is a factory of them."""
    config = config | {"num_hidden_layers": layers}
    model_class, arguments = classes_of(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    Quantization(4, 64).apply(model)
    model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))
    # As where every product and attention of this many rows was chosen to be ours.
    wiring = factory and swap_layers(
        model, config=config, kernels=Kernels(factory), rows={}, exact=True
    )
    tokenizer = type("Tokenizer", (), {"eos_token_ids": (), "has_chat_template": False})()
    return Target(model, tokenizer=tokenizer, config=config, name="host", wiring=wiring)


def build(target: Target, rows: int) -> tuple[float, mx.array]:
    """Seconds that the host takes to build a verify, and its lazy logits."""
    session = target.start()
    proposal = Proposal([7] * rows)
    with on_a_gpu():
        start = time.perf_counter()
        logits, _ = session.verify(proposal)
        return time.perf_counter() - start, logits


def fastest(
    pairs: list[list[Target]], kernels: Either, rows: int, repeats: int
) -> list[list[float]]:
    """The least seconds of each target's verify, which take turns."""
    best = [[1.0] * len(targets) for targets in pairs]

    def traced(x: mx.array) -> mx.array:
        for _ in range(repeats):
            for side, targets in enumerate(pairs):
                for place, target in enumerate(targets):
                    best[side][place] = min(best[side][place], build(target, rows)[0])
        return x + 1

    kernels.real = True
    with tempfile.TemporaryDirectory() as folder:
        mx.export_function(str(Path(folder) / "traced.mlxfn"), traced, mx.zeros(4))
    kernels.real = False
    return best


def main() -> None:
    """See the module's docstring."""
    args = options_of(__doc__, rows=16, repeats=300)
    for name, (config, period, depth) in MODELS.items():
        kernels = Either()
        pairs = [[target_of(config, n * period, plan) for n in (1, 2)] for plan in (None, kernels)]
        mx.eval([target.model.parameters() for targets in pairs for target in targets])
        best = fastest(pairs, kernels=kernels, rows=args.rows, repeats=args.repeats)
        micros = [1e6 * (more - less) / period for less, more in best]
        for side, targets in zip(("MLX", "ours"), pairs, strict=True):
            less, more = (graph_nodes(build(target, args.rows)[1]) for target in targets)
            added = more - less
            launches = sum(n for kind, n in added.items() if kind not in VIEWS | CONSTANTS)
            micros_per_layer = micros[side == "ours"]
            nodes = added.total()
            print(
                f"{name:12} {side:4} {micros_per_layer:6.1f} us, {nodes / period:6.1f} nodes, "
                f"{launches / period:5.1f} launches a layer; "
                f"{1e-3 * micros_per_layer * depth:.2f} ms, {nodes * depth // period} nodes, "
                f"{launches * depth // period} launches a verify"
            )
        print(f"{name:12} ours over MLX's: {micros[1] / micros[0]:.2f}")


if __name__ == "__main__":
    main()
