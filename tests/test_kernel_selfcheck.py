"""Kernels that do not compile, or compute something else, are found before a model uses them."""

import pytest
from metal_host import EmulatedKernel

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.modules import Kernels
from dflash_mlx.kernels.selfcheck import fault
from dflash_mlx.loading import load as loading


def broken(name, wrong):
    """A factory whose kernels of this name fail in the way that `wrong` makes of their results."""

    def factory(**definition):
        kernel = EmulatedKernel(**definition)
        if not definition["name"].startswith(name):
            return kernel
        return lambda **call: wrong(kernel(**call))

    return factory


def refuse(results):
    raise RuntimeError("unable to build the metal library\nfrom source")


def slightly_off(results):
    return [results[0] * 1.05]


def not_a_number(results):
    return [results[0] * float("nan")]


def test_nothing_is_found_where_all_is_well():
    assert fault(Kernels(EmulatedKernel)) is None


@pytest.mark.parametrize("wrong", [slightly_off, not_a_number])
@pytest.mark.parametrize(
    "name", ["verify_matmul_plain", "verify_matmul_moe_plain", "block_attention_merge"]
)
def test_a_wrong_result_is_found(name, wrong):
    assert "differs from its reference" in fault(Kernels(broken(name, wrong)))


def test_a_kernel_that_does_not_compile_is_found():
    problem = fault(Kernels(broken("verify_matmul_affine", refuse)))
    assert problem.startswith("the product by 4-bit weights does not run (unable to build")


def test_the_fallback_is_said_and_exact_decoding_has_none():
    kernels = Kernels(broken("block_attention_merge", slightly_off))
    with pytest.warns(UserWarning, match="MLX's own kernels run, for ours are broken here"):
        assert loading._working(kernels, exact=None) is None
    with pytest.raises(KernelError, match="Exact decoding needs our kernels"):
        loading._working(kernels, exact=True)
    working = Kernels(EmulatedKernel)
    assert loading._working(working, exact=True) is working
