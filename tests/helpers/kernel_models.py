"""Random models whose verify runs on our kernels, what counts launches, and what records them."""

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

HEAD = 64  # numbers in a head, the fewest that the attention kernel takes


def quick_factory():
    """Kernels for whole models: the emulator looks for no races, which other tests do."""
    return kernel_factory(checked=False)


def base_name(name: str) -> str:
    """A kernel's name without its constants: `verify_matmul_affine`."""
    return re.split(r"_(?:half|bfloat|float)\b|_(?:half|bfloat|float)_", name)[0]


class Launches:
    """A factory of emulated kernels that counts their calls by name, without its constants.

    change: of a name, the keywords of a call and its results: what becomes of the results.
    libraries: the names with constants and dtypes of what was called: what Metal would compile.
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
    """A random model in half precision, its matrices in so many bits."""
    model = families.random_model(family, seed=3, head_dim=HEAD, **changes)
    model.set_dtype(dtype)
    if quantization := Quantization.of(bits, "affine", 32):
        quantization.apply(model)
    return model


def exact_target(
    family: str, factory, bits: int | None = 4, dtype: mx.Dtype = mx.bfloat16
) -> Target:
    """Such a model with all of its verify on our kernels."""
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
    """Such a model in float32, where ours won from 4 rows on."""
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
    """The same model on MLX's kernels alone."""
    model = half_precision(family, None, mx.float32)
    return Target(
        model, tokenizer=families.CharacterTokenizer(), config=families.CONFIGS[family], name=family
    )


class Recorder:
    """A factory whose kernels compute zeros and keep the Metal that MLX would compile.

    Attributes:
        wrappers: of all calls, once each, by their text.
        launches: of every call the name, the grid, the threadgroup and the shapes of its outputs.
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
