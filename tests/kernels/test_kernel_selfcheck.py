"""Kernels that do not compile, or compute something else, are left to MLX, and no others."""

import warnings
from typing import Any

import families
import mlx.core as mx
import mlx.nn as nn
import pytest
import tinymodels
from kernel_calls import Recorder
from kernel_check import on_gpu_or_emulator
from kernel_models import half_precision, quick_factory
from kernel_trees import random_tree

import dflash_mlx as dm
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.block_attention import BlockAttention, TreeMask
from dflash_mlx.kernels.choose import attention_rows
from dflash_mlx.kernels.fused import UNITS, gated_key
from dflash_mlx.kernels.modules import SWAPS, Kernels, wire
from dflash_mlx.kernels.selfcheck import Noise, faults
from dflash_mlx.kernels.shapes import matrices
from dflash_mlx.kernels.weights import AffineWeights
from dflash_mlx.loading import wiring
from dflash_mlx.machine.chips import chip_named
from dflash_mlx.targets.autotune import candidates, guesses
from dflash_mlx.targets.selfcheck import model_checks, weight_checks

pytestmark = on_gpu_or_emulator

COMPILER = """[metal::Device] Unable to build metal library from source
program_source:41:9: warning: unused variable 'a'
program_source:52:13: error: use of undeclared identifier 'fragment'
"""


class Broken:
    """A factory whose kernels fail in the calls that `concerns` is true of.

    concerns: of a kernel's name and the keywords of a call.
    wrong:    what becomes of its results there.
    """

    def __init__(self, concerns, wrong):
        self.concerns, self.wrong, self.factory = concerns, wrong, quick_factory()

    def __call__(self, name, **definition):
        kernel = self.factory(name=name, **definition)

        def call(**given):
            results = kernel(**given)
            return self.wrong(results) if self.concerns(name, given) else results

        return call


def named(prefix):
    return lambda name, given: name.startswith(prefix)


def with_argument(prefix, *argument):
    """Calls of these kernels that have a template argument."""
    return lambda name, given: name.startswith(prefix) and argument in given.get("template", ())


def does_not_compile(results):
    raise RuntimeError(COMPILER)


def too_many_threads(results):
    raise ValueError("Thread group size (512) is greater than the maximum allowed (448).")


def slightly_off(results):
    return [result * 1.05 for result in results]


def one_element_off(results):
    first = results[0].reshape(-1)
    first[-1] = first[-1] + 1
    return [first.reshape(results[0].shape), *results[1:]]


def not_a_number(results):
    return [results[0] * float("nan"), *results[1:]]


def target_of(family, bits=4):
    """A random target whose layers are MLX's."""
    config = families.CONFIGS[family]
    return dm.Target(half_precision(family, bits), families.Letters(), config, family)


def found(family, factory, bits=4):
    """What the self-check finds in a random model."""
    return faults(model_checks(target_of(family, bits), Kernels(factory), {}, exact=True))


def keys(family, bits=4):
    """The names of the products of a random model."""
    of = half_precision(family, bits), families.CONFIGS[family]
    return {matrix.key for _, _, matrix in matrices(*of)}


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3", 8), ("qwen3_5", 4), ("qwen3_moe", None), ("gpt_oss", 4)]
)
def test_nothing_is_found_where_all_is_well(family, bits):
    assert found(family, quick_factory(), bits) == {}


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("bits", [None, 8])
def test_every_form_of_attention_that_can_run_is_checked(bits, key_heads):
    """A form is what MLX compiles once. Trees have up to 64 rows, whatever a chain has."""
    model = families.random_model("qwen3", head_dim=64, num_key_value_heads=key_heads)
    model.set_dtype(mx.bfloat16)
    target = dm.Target(model, families.Letters(), families.CONFIGS["qwen3"], "qwen3")
    checked, ran, noise = Recorder(), Recorder(), Noise(mx.bfloat16)
    rows, heads = guesses(target, chip_named("M4")), model.layers[0].self_attn.n_heads
    for check in model_checks(target, Kernels(checked), rows, exact=False):
        if check.key.startswith("attention"):
            check.ours()
    keys: Any = noise(1, key_heads, 80, 64)
    if bits:
        keys = AffineWeights(*mx.quantize(keys, 64, bits), bits, 64)
    attention = BlockAttention(ran)
    for count in attention_rows(rows, f"attention {heads}/{key_heads} heads of 64", 80):
        for tree in (None, TreeMask(*random_tree(count))):
            attention(noise(1, heads, count, 64), keys, keys, scale=0.1, tree=tree)
    assert set(ran.wrappers) <= set(checked.wrappers)


ATTENTION = "attention 4/2 heads of 64"
DELTA = "delta rule 4/2 heads of 32x32"
# family, what is broken, and the beginnings of all names that are left to MLX
CASES = {
    "products": ("qwen3", named("verify_matmul_affine"), ("64x", "128x", "256x", "gate and up")),
    "gate and up": ("qwen3", with_argument("verify_matmul", "GATE_UP", True), ("gate and up",)),
    "gate and up of experts": (
        "qwen3_moe",
        named("verify_matmul_moe_affine_gate_up"),
        ("gate and up",),
    ),
    "experts": ("qwen3_moe", named("verify_matmul_moe_affine"), ("64x64 affine", "gate and up")),
    "fused": ("qwen3", named("verify_qkv_3"), ("256 and 128 and 128 fused",)),
    "what enters a recurrence": ("qwen3_5", named("verify_qkv_4"), ("",)),
    "attention": ("qwen3", named("block_attention"), (ATTENTION,)),
    "quantized keys": ("qwen3", named("block_attention_quantized"), (f"{ATTENTION} over ",)),
    "4-bit keys": (
        "qwen3",
        with_argument("block_attention_quantized", "BITS", 4),
        (f"{ATTENTION} over 4-bit keys",),
    ),
    "trees": ("gpt_oss", with_argument("block_attention", "TREE", True), (ATTENTION,)),
    "sinks": ("gpt_oss", with_argument("block_attention_merge", "SINKS", True), (ATTENTION,)),
    "the recurrence": ("qwen3_5", named("delta_verify_chain"), (DELTA,)),
    "the recurrence in trees": ("qwen3_5", named("delta_verify_tree"), (DELTA,)),
    "the replay": ("qwen3_5", named("delta_replay"), (DELTA,)),
}


@pytest.mark.parametrize(
    ("family", "concerns", "left", "wrong"),
    [(*case, (slightly_off, does_not_compile)[at % 2]) for at, case in enumerate(CASES.values())],
    ids=CASES.keys(),
)
def test_what_is_broken_is_found_and_nothing_else(family, concerns, left, wrong):
    problems = found(family, Broken(concerns, wrong))
    assert problems and all(key.startswith(left) for key in problems)
    for start in left:
        assert any(key.startswith(start) for key in problems), start
    if wrong is does_not_compile:
        words = (
            "does not run (program_source:52:13: error: use of undeclared identifier 'fragment')"
        )
    else:
        words = "differs from its reference by"
    assert all(words in problem for problem in problems.values())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (too_many_threads, "does not run (Thread group size (512) is greater than"),
        (one_element_off, "differs from its reference by"),
        (not_a_number, "differs from its reference by nan"),
        (lambda results: [results[0][:, :-1]], "does not run|gives"),
    ],
)
def test_every_way_to_fail_is_found(wrong, words):
    broken = with_argument("verify_matmul_affine", "GATE_UP", True)
    [problem] = found("qwen3", Broken(broken, wrong)).values()
    assert any(word in problem for word in words.split("|"))


def asked_of(checks):
    """What attention is asked for by checks, as dictionaries; it is not computed."""
    asked = []

    def attention(queries, keys, values, **named):
        bits = getattr(keys, "bits", None)
        asked.append(named | {"nodes": queries.shape[2], "length": keys.shape[2], "bits": bits})
        return mx.zeros_like(queries)

    for check in checks(attention):
        check.ours()
    return asked


def test_every_kind_of_layer_is_asked():
    """Windows of both kinds, and each dtype in which a shape occurs."""
    target, kernels = target_of("gpt_oss"), Kernels(Recorder())

    def checks(attention):
        kernels.attention = attention
        every = model_checks(target, kernels, {}, True)
        return [check for check in every if check.key.startswith("attention")]

    assert {of["window"] for of in asked_of(checks)} == {None, target.config["sliding_window"]}
    both = nn.Module()
    both.a, both.b = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
    both.a.set_dtype(mx.bfloat16), both.b.set_dtype(mx.float16)  # of one size, and so of one name
    dtypes = {c.ours()[0].dtype for c in weight_checks(both, {}, kernels, {}, True)}
    assert dtypes == {mx.bfloat16, mx.float16}


def wired(family, broken):
    """A random model wired as `load` does it."""
    target, kernels = target_of(family), Kernels(quick_factory())
    rows, model = candidates(target), target.model
    return model, wire(model, target.config, kernels, rows, broken=frozenset(broken))


def test_what_is_broken_is_left_to_mlx_and_the_rest_is_not():
    model, wiring = wired("qwen3", ())
    assert {type(layer.mlp) for layer in model.layers} <= set(UNITS.values())
    [unit] = {gated_key(layer.mlp) for layer in model.layers}
    model, wiring = wired("qwen3", {unit})
    assert {type(layer.mlp) for layer in model.layers} <= set(UNITS)
    assert type(model.layers[0].mlp.gate_proj) in SWAPS.values()
    shape = next(matrix.key for path, _, matrix in matrices(model, {}) if "down_proj" in path)
    model, wiring = wired("qwen3", {shape})
    assert type(model.layers[0].mlp.down_proj) in SWAPS
    assert type(model.layers[0].mlp.gate_proj) in SWAPS.values()
    assert type(model.layers[0].self_attn.q_proj) in SWAPS.values()


def test_broken_attention_over_quantized_keys_leaves_the_other():
    called = []
    factory = Broken(lambda name, given: called.append(name), None)
    target, broken = target_of("qwen3"), frozenset({f"{ATTENTION} over 8-bit keys"})
    rows = {key: of for key, of in candidates(target).items() if key.startswith(ATTENTION)}
    target.wiring = wire(target.model, target.config, Kernels(factory), rows, broken=broken)
    for bits, used in ((None, True), (8, False), (4, True)):
        called.clear()
        mx.eval(target.start(kv_bits=bits).verify(dm.Proposal([7, 9]))[0])
        assert any(name.startswith("block_attention") for name in called) == used, bits


@pytest.fixture
def folder(tmp_path):
    return str(tinymodels.save_target(tmp_path, "qwen3", head_dim=64))


def test_a_load_says_what_it_leaves_to_mlx(folder, monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4 Max"})
    factory = Broken(named("verify_matmul_affine_gate_up"), does_not_compile)
    with pytest.warns(UserWarning, match="a kernel of ours is broken here and left out") as said:
        target = dm.load_target(folder, bits=4, group_size=32, metal_kernel=factory)
    assert "error: use of undeclared identifier 'fragment'" in str(said[0].message)
    assert type(target.model.layers[0].mlp.gate_proj) in SWAPS.values()
    assert type(target.model.layers[0].mlp) in UNITS
    target.start().verify(dm.Proposal([7] * 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dm.load_target(folder, bits=4, group_size=32, metal_kernel=quick_factory())


def test_exact_decoding_does_without_no_kernel(folder, monkeypatch):
    broken = Broken(named("block_attention_merge"), slightly_off)
    load = dict(bits=4, group_size=32, metal_kernel=broken)
    with pytest.raises(KernelError, match="Exact decoding needs our kernels: attention 4/2 heads"):
        dm.load_target(folder, **load, kernels="exact")
    free = candidates(dm.load_target(folder, bits=4, group_size=32, kernels="off"))
    monkeypatch.setattr(wiring, "read_choices", lambda forms: free)
    with pytest.warns(UserWarning, match="ours is broken here"):
        assert not dm.load_target(folder, **load).wiring.exact


def careless():
    """Kernels that are right, but round otherwise where several rows share a call."""

    def coarse(results):
        return [(y.view(mx.uint32) & 0xFFFFFFF0).view(mx.float32) for y in results]

    def concerns(name, given):
        several = given["inputs"][0].shape[0] > 1
        return (
            name == "verify_matmul_affine" and several and given["output_dtypes"][0] == mx.float32
        )

    return Broken(concerns, coarse)


def test_an_exact_load_compares_the_rows_of_the_model(folder, monkeypatch):
    load = dict(bits=4, group_size=32, metal_kernel=careless())
    with pytest.raises(KernelError, match="row 1 of 16 that .* verifies has other bits here"):
        dm.load_target(folder, **load, kernels="exact")
    # Where nobody asked, the model is loaded all the same, and drafts are not taken for exact.
    with monkeypatch.context() as patch:
        model = dm.load_target(folder, bits=4, group_size=32, kernels="off")
        free = candidates(model)
        patch.setattr(wiring, "read_choices", lambda forms: free)
        with pytest.warns(UserWarning, match="has other bits here than alone"):
            assert not dm.load_target(folder, **load).wiring.exact
