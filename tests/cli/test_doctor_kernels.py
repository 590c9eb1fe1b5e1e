"""`dflash-mlx doctor --kernels` calls every kernel, names failures, and writes a report."""

import json

import mlx.core as mx
import pytest
from kernel_models import every_call, quick_factory
from metal_host import needs_compiler
from program import run

from dflash_mlx.cli import doctor_kernels
from dflash_mlx.kernels.autotune import Stopwatch
from dflash_mlx.kernels.modules import Kernels
from dflash_mlx.traces import Traces


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_a_mac_it_says_that_it_needs_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("doctor", "--kernels")
    assert done.returncode == 1 and "needs a Mac" in done.stderr and not [*tmp_path.iterdir()]


def test_every_kernel_is_called():
    names = " ".join(sorted({name for name, *_ in every_call().launches}))
    for part in (
        "_quantized_tree_ merge_sinks_ BLOCKS2 BITS8 GROUP128 _tensor_4_split_ merge_splits_4_ "
        "_plain_gate_up_split_ merge_splits_gate_up_ moe_affine_gate_up_ verify_chain_ verify_tree_"
    ).split():
        assert part in names, part


@needs_compiler
def test_the_report(tmp_path, monkeypatch, capsys):
    """Two kernels run on the emulator. The one for experts adds 1 to its results, and must fail."""
    factory = quick_factory()

    def metal_kernel(name, **definition):
        kernel = factory(name=name, **definition)

        def wrong_kernel(**call):
            return [result + 1 for result in kernel(**call)]

        return wrong_kernel if "moe" in name else kernel

    def two_instances(kernels):
        weights = mx.ones((2, 8, 64))
        return [
            lambda: kernels.product(mx.ones((3, 64)), mx.ones((8, 64))),
            lambda: kernels.experts(mx.ones((1, 64)), weights, experts=mx.array([[0, 1]])),
        ]

    patch = monkeypatch.setattr
    patch(Kernels, "instances", two_instances)
    patch(doctor_kernels, "FAMILIES", {"qwen3": doctor_kernels.FAMILIES["qwen3"]})
    patch(doctor_kernels, "SHAPES", ((32, 64),))
    patch(doctor_kernels, "CHECK_SECONDS", 1e9)  # however slow this machine is
    patch(doctor_kernels, "Stopwatch", lambda repeats: Stopwatch(1e9, repeats))
    patch(doctor_kernels, "TOKENS", 4)
    patch(doctor_kernels, "TOKENS_PER_SAMPLE", 2)
    patch(doctor_kernels, "machine", lambda blas: {"chip": "a test"})
    patch(doctor_kernels.mx.metal, "is_available", lambda: True)
    patch(doctor_kernels.mx.fast, "metal_kernel", metal_kernel)
    patch(doctor_kernels.mx, "device_info", lambda: {"device_name": "Apple M9 Max"})
    patch(Traces, "call", lambda *args: None)  # the emulator cannot run inside a trace
    patch(doctor_kernels, "sample_memory", lambda model: [[1.0, 0.5]])
    file = tmp_path / "report.json"
    assert not doctor_kernels.report(None, file)
    content = json.loads(file.read_text())
    assert content["machine"] == {"chip": "a test"} and content["checked"] == 2
    [name] = content["failures"]
    assert "2 of 2x8x64" in name and content["memory"] == [[1.0, 0.5]]
    assert len(content["milliseconds, MLX and ours"]) == 2
    first, *_, last = capsys.readouterr().err.strip().splitlines()
    assert "2 calls checked, 0 not reached, 1 wrong" in first and "report.json" in last
