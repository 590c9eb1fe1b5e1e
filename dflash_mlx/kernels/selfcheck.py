"""Do the kernels compile and compute here what their references do?

They are developed on an emulator and meet a real GPU on the user's machine first. So when a model
is loaded on Metal, one small call of each kind is compared with its reference in plain MLX, before
any layer is given to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from .block_attention import block_attention_reference
from .verify_matmul import verify_matmul_reference
from .verify_matmul_moe import verify_matmul_moe_reference
from .weights import AffineWeights, Weights

if TYPE_CHECKING:
    from .modules import Kernels

TOLERANCE = 2e-3  # of the largest value; float16 and short sums come to less than a tenth of it


def fault(kernels: Kernels) -> str | None:
    """What is wrong with the kernels on this device; None when nothing was found."""
    for name, ours, reference in _calls(kernels):
        try:
            difference = mx.abs(ours().astype(mx.float32) - reference).max()
            wrong = not (difference <= TOLERANCE * mx.abs(reference).max()).item()  # NaN is, too
        except RuntimeError as error:  # what MLX raises when Metal cannot compile or run it
            return f"{name} does not run ({str(error).strip().splitlines()[0][:200]})"
        if wrong:
            return f"{name} differs from its reference by {difference.item():.2g}"
    return None


def _calls(kernels: Kernels) -> Iterator[tuple[str, Callable[[], mx.array], mx.array]]:
    """A name, a kernel's call and its reference's result in f32, for each kind of call."""
    keys = iter(mx.random.split(mx.random.key(0), 8))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(mx.float16)

    product, experts, attention = kernels.product, kernels.experts, kernels.attention
    x, plain, stacked = normal(3, 128), normal(48, 128), normal(4, 32, 128)
    weights: dict[str, Weights] = {"plain": plain}
    for bits in (4, 8):
        words = mx.quantize(plain, group_size=64, bits=bits)
        weights[f"{bits}-bit"] = AffineWeights(*words, bits=bits, group_size=64)
    for kind, w in weights.items():
        reference = verify_matmul_reference(x, w).astype(mx.float32)
        yield f"the product by {kind} weights", partial(product, x, w), reference
    routed = (x, stacked, mx.array([[0, 2], [3, 2], [1, 0]], mx.uint32))
    reference = verify_matmul_moe_reference(*routed).astype(mx.float32)
    yield "the product by experts", partial(experts, *routed), reference
    attended = normal(1, 4, 3, 64), normal(1, 2, 40, 64), normal(1, 2, 40, 64)
    reference = block_attention_reference(*attended, scale=0.125).astype(mx.float32)
    yield "attention", partial(attention, *attended, scale=0.125), reference
