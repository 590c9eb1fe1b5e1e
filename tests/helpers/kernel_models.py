"""Random models that verify on our kernels, and kernel factories that count or record calls."""

import copy
import re
from collections.abc import Callable
from typing import Any

import families
import mlx.core as mx
from kernel_check import kernel_factory
from metal_host.wrapper import Wrapper, wrap

from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.loading.kernel_plan import candidates
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.targets import Target

HEAD = 64  # the smallest head size that the attention kernel takes


def quick_factory():
    """Kernels for whole models. The emulator does not look for races, to be faster."""
    return kernel_factory(checked=False)


def base_name(name: str) -> str:
    """A kernel's name without its constants: `verify_matmul_affine`."""
    # Constants begin with a dtype.
    return re.split(r"_(?:half|bfloat|float)\b|_(?:half|bfloat|float)_", name)[0]


class Launches:
    """A factory of emulated kernels that counts their calls.

    Args:
        factory: makes the kernels; by default `quick_factory`.
        change: gives other results for the name of a kernel, the keywords of a call, its results.

    Attributes:
        counts: the number of calls by `base_name`.
        libraries: the kernels that Metal would compile: names with constants, and dtypes.
    """

    def __init__(self, factory=None, change=None) -> None:
        self.counts: dict[str, int] = {}
        self.libraries: set[str] = set()
        self.factory = factory or quick_factory()
        self.change = change or (lambda name, call, results: results)

    def __call__(self, name, **arguments):
        kernel = self.factory(name=name, **arguments)
        base = base_name(name)

        def launch(**call):
            self.counts[base] = self.counts.get(base, 0) + 1
            self.libraries.add(f"{name} {[x.dtype for x in call['inputs']]}")
            return self.change(name, call, kernel(**call))

        return launch


def half_precision(family: str, bits: int | None = 4, dtype: mx.Dtype = mx.bfloat16, **changes):
    """A random model in half precision, with quantized matrices unless `bits` is None."""
    model = families.random_model(family, seed=3, head_dim=HEAD, **changes)
    model.set_dtype(dtype)
    quantization = Quantization.of(bits, "affine", 32)
    if quantization:
        quantization.apply(model)
    return model


def exact_target(
    family: str, factory, bits: int | None = 4, dtype: mx.Dtype = mx.bfloat16
) -> Target:
    """A target of a half-precision model that verifies exactly, all on our kernels."""
    model = half_precision(family, bits, dtype)
    config = copy.deepcopy(families.CONFIGS[family])
    kernel_plan = swap_layers(model, config=config, kernels=Kernels(factory), rows={}, exact=True)
    return Target(
        model,
        tokenizer=families.CharacterTokenizer(),
        config=config,
        name=family,
        kernel_plan=kernel_plan,
    )


def chosen_target(family: str, factory) -> Target:
    """A float32 target for which our kernels were chosen for 4 and more rows."""
    target = float_target(family)
    rows = {
        key: frozenset(range(4, max(candidate) + 1))
        for key, candidate in candidates(target).items()
    }
    target.kernel_plan = swap_layers(
        target.model, config=target.config, kernels=Kernels(factory), rows=rows
    )
    return target


def float_target(family: str) -> Target:
    """A float32 target on MLX's kernels."""
    model = half_precision(family, None, mx.float32)
    return Target(
        model, tokenizer=families.CharacterTokenizer(), config=families.CONFIGS[family], name=family
    )


class Recorder:
    """A factory of kernels that compute zeros and record the Metal code that MLX would compile.

    Attributes:
        wrappers: the functions of all calls, by their text.
        launches: the name, grid, threadgroup and output shapes of every call.
    """

    def __init__(self) -> None:
        self.wrappers: dict[str, Wrapper] = {}
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], list[Any]]] = []

    def __call__(
        self,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        **_: Any,
    ) -> Callable[..., list[mx.array]]:
        def call(
            inputs, output_shapes, output_dtypes, grid=(), threadgroup=(), **_
        ) -> list[mx.array]:
            self.launches.append((name, grid, threadgroup, [tuple(s) for s in output_shapes]))
            arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
            outputs = list(zip(output_names, output_dtypes, strict=True))
            named = list(zip(input_names, arrays, strict=True))
            wrapper = wrap(name, inputs=named, outputs=outputs, header=header, body=source)
            self.wrappers[wrapper.text] = wrapper
            return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

        return call


def every_call() -> Recorder:
    """The calls of `Kernels.instances`, including those on tensor units."""
    recorder = Recorder()
    for call in Kernels(recorder, tensor_units=True).instances():
        call()
    return recorder
