"""Whole models verifying through our kernels, on the emulator: drafted text is the plain one.

Half precision and 4 bits, where stock kernels of a GPU round a row differently in a block.
"""

from functools import partial

import families
import mlx.core as mx
import mlx.nn as nn
import pytest
import tinymodels
from kernel_check import (
    on_gpu_or_emulator,
    same_bits,
)
from kernel_models import (
    HEAD,
    Launches,
    exact_target,
    half_precision,
    quick_factory,
)
from mlx.utils import tree_flatten
from oracle import Oracle

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.kernels.fused import UNITS, VerifySwitchGLU
from dflash_mlx.kernels.modules import SWAPS, Kernels, VerifyConv1d, wire
from dflash_mlx.kernels.shapes import matrices
from dflash_mlx.loading import wiring
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loop import generate
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target
from dflash_mlx.targets.autotune import candidates

pytestmark = on_gpu_or_emulator

TOKENS, BLOCK = 24, 16
PROMPT = families.random_prompt(9, seed=1)


def test_quantized_keys_and_values():
    target = exact_target("qwen3", quick_factory())
    plain = generate(target, None, PROMPT, max_tokens=12, kv_bits=8).tokens
    oracle = Oracle(PROMPT, plain, target.vocab_size, 0.7)
    drafted = generate(target, oracle, PROMPT, max_tokens=12, block_size=8, kv_bits=8)
    assert drafted.tokens == plain


def test_a_kernel_whose_rows_depend_on_each_other_would_be_noticed():
    """One that gives bfloat16 with 3 bits less whenever there is more than one row."""

    def coarse(name, call, results):
        x = call["inputs"][0]
        if not name.startswith("verify_matmul") or x.size == x.shape[-1]:
            return results
        return [(y.view(mx.uint16) & 0xFFF8).view(y.dtype) for y in results]

    target = exact_target("qwen3", Launches(change=coarse))
    plain = generate(target, None, PROMPT, max_tokens=TOKENS).tokens
    oracle = Oracle(PROMPT, plain, target.vocab_size, 1.0)
    with pytest.raises(AssertionError, match="the anchor is not the token"):
        generate(target, oracle, PROMPT, max_tokens=TOKENS, block_size=BLOCK)


def test_a_swapped_layer_keeps_its_weights_and_their_names():
    model, config = half_precision("qwen3_moe"), families.CONFIGS["qwen3_moe"]
    before = dict(tree_flatten(model.parameters()))
    layers = dict(model.named_modules())
    wiring = wire(model, config, Kernels(quick_factory()), {}, exact=True)
    after = dict(tree_flatten(model.parameters()))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    swapped = {path: module for path, module in model.named_modules() if path in wiring.layers}
    assert all(layers[path] is module for path, module in swapped.items())
    assert {type(module) for module in swapped.values()} <= set(SWAPS.values())
    assert VerifySwitchGLU in map(type, model.modules())
    # And no class was touched: a new layer is a stock one.
    assert type(nn.Linear(8, 8)) is nn.Linear and type(half_precision("qwen3").lm_head) in SWAPS


def test_a_gated_unit_is_fused_only_as_a_whole():
    """Not with a part that is left to MLX."""
    config = families.CONFIGS["qwen3"]
    model, kernels, four = half_precision("qwen3"), Kernels(quick_factory()), frozenset({4})
    shape = {matrix.columns: matrix.key for _, _, matrix in matrices(model, config)}
    wire(model, config, kernels, {shape[128]: four})
    assert type(model.layers[0].mlp.gate_proj) in SWAPS.values()
    assert type(model.layers[0].mlp) not in UNITS.values()


@pytest.mark.parametrize(
    ("groups", "biases", "shared"),
    [
        ((32, 32), (False, False), True),
        ((32, 64), (False, False), False),
        ((32, 32), (True, False), False),
        ((32, 32), (False, True), False),
    ],
)
def test_gate_and_up_of_other_kinds_share_no_launch(groups, biases, shared):
    model = half_precision("qwen3")
    unit = model.layers[0].mlp
    unit.gate_proj, unit.up_proj = (
        nn.QuantizedLinear(64, 128, bias, group, 4)
        for bias, group in zip(biases, groups, strict=True)
    )
    wire(model, families.CONFIGS["qwen3"], Kernels(quick_factory()), {}, exact=True)
    assert (type(unit) in UNITS.values()) == shared


def test_a_convolution_in_one_order_is_the_stock_one():
    x = mx.random.normal((1, 12, 8), key=mx.random.key(0))
    layer = nn.Conv1d(8, 8, 4, groups=8)
    layer.bias = mx.random.normal((8,), key=mx.random.key(1))
    stock = layer(x)
    layer.__class__, layer._rows = VerifyConv1d, range(1, 65)
    assert mx.allclose(layer(x), stock, atol=1e-6)
    assert same_bits(layer(x)[:, 4:5], layer(x[:, 4:8]))


def test_many_rows_are_left_to_stock_layers():
    launches = Launches()
    target = exact_target("qwen3", launches)
    launches.counts.clear()  # of the forward that shows where the parts are
    session = target.start()
    next(session.prefill(families.random_prompt(130, seed=1)))  # 66 tokens; the last 64 are ours
    assert session.position == 66
    assert launches.counts == {"verify_matmul_affine": 1}  # the head, of one row
    session.verify(Proposal([1]))
    assert launches.counts
    with pytest.raises(SettingsError, match="at most 64 rows"):
        session.verify(Proposal([1] * 65))


def test_exact_by_default_only_where_every_layer_can_be(monkeypatch, tmp_path):
    """On a machine where every product was measured to be free, with heads of the right size."""
    for head_dim, exact in ((HEAD, True), (HEAD // 2, False)):
        folder = tinymodels.save_target(tmp_path / str(head_dim), head_dim=head_dim)
        load = partial(
            dm.load_target, str(folder), bits=8, group_size=32, metal_kernel=quick_factory()
        )
        unmeasured = load()
        assert not unmeasured.wiring.exact
        plain = load(kernels="off")
        free = candidates(plain)
        with monkeypatch.context() as patch:
            patch.setattr(wiring, "read_choices", lambda forms, free=free: free)
            target = load()
        assert target.wiring.exact == exact
        target.start().verify(Proposal([7, 9]))


def test_without_metal_nothing_changes(tmp_path):
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    folder = str(tinymodels.save_target(tmp_path, "qwen3_moe"))
    target = dm.load_target(folder, bits=4)
    assert target.wiring is None
    assert not {type(module) for module in target.model.modules()} & set(SWAPS.values())
    with pytest.raises(SettingsError, match="needs Metal"):
        dm.load_target(folder, kernels="exact")


def test_what_cannot_be_exact_is_refused():
    kernels = Kernels(quick_factory())

    def refusal(model, family):
        with pytest.raises(SettingsError, match="leave it out") as caught:
            config = families.CONFIGS[family]
            wiring = wire(model, config, kernels, {}, exact=True)
            Target(model, families.Letters(), config, family, wiring)
        return str(caught.value)

    model = families.random_model("qwen3", head_dim=HEAD)
    Quantization(4, 32, "mxfp4").apply(model)
    assert "mxfp4" in refusal(model, "qwen3")
    kimi = families.random_model("kimi_k25")
    assert "MoEGate" in refusal(kimi, "kimi_k25")
    assert not {type(module) for module in kimi.modules()} & set(SWAPS.values())
    assert "Attention" in refusal(families.random_model("qwen3"), "qwen3")  # heads of 32
    sharing = families.random_model("gemma4_E4B-like", head_dim=HEAD)
    assert "Attention" in refusal(sharing, "gemma4_E4B-like")


@pytest.mark.parametrize("loader", [dm.load, dm.load_target, dm.load_drafter])
@pytest.mark.parametrize("kernels", [5, "yes", True])
def test_what_runs_no_kernels_is_refused(loader, kernels):
    with pytest.raises(SettingsError, match='kernels must be "auto", "off"'):
        loader("tiny", kernels=kernels)
