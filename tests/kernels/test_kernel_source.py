"""What the kernel factory is handed: one ASCII text with every local include in it, once."""

from pathlib import Path

import metal_host
import mlx.core as mx
import pytest
from metal_host.compiler import Build

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels import source
from dflash_mlx.kernels.launcher import in_device_memory

METAL = Path(__file__).parents[2] / "metal"


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """A folder that stands in for metal/."""
    monkeypatch.setattr(source, "files", lambda package: tmp_path)
    return tmp_path


def test_includes_are_inlined_once(folder):
    (folder / "a.h").write_text("#pragma once\n#include <metal_stdlib>\nint a;\n")
    (folder / "b.h").write_text('#pragma once\n#include "a.h"\nint b;\n')
    (folder / "kernel.metal").write_text('#include "a.h"\n#include "b.h"\nint kernel;\n')
    text = source.metal_source("kernel.metal")
    assert text == "#include <metal_stdlib>\nint a;\nint b;\nint kernel;\n"


def test_comments_and_indentation_stay_in_the_file(folder):
    (folder / "kernel.metal").write_text("// why\n\nint f() {\n  return 1;  // one\n}\n")
    assert source.metal_source("kernel.metal") == "int f() {\nreturn 1;\n}\n"


def test_a_character_outside_ascii_is_refused(folder):
    (folder / "kernel.metal").write_text("// 16 × 8\n", encoding="utf-8")
    with pytest.raises(KernelError, match="metal/kernel.metal has a character outside ASCII"):
        source.metal_source("kernel.metal")


@metal_host.needs_compiler
@pytest.mark.parametrize("name", sorted(p.name for p in METAL.glob("*.*") if p.suffix != ".py"))
def test_every_file_compiles_by_itself(name):
    """As on a Mac (`xcrun -sdk macosx metal -c`), with stand-ins for Metal's headers: it includes
    what it needs. What its templates hold is compiled where the kernels are tested.
    """
    Build().check_syntax(METAL / name)


def test_small_inputs_are_padded_to_what_mlx_leaves_in_device_memory():
    small = mx.array([[1, 2, 3]])
    large = mx.ones((2, 4))
    assert in_device_memory(small).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert in_device_memory(large) is large


@pytest.mark.parametrize("path", sorted(METAL.glob("*.metal")), ids=lambda path: path.name)
def test_nothing_is_fused_that_the_text_does_not_fuse(path):
    """Else one instance of a template may round where another does not."""
    before, pragma, _ = source.metal_source(path.name).partition("#pragma METAL fp contract(off)\n")
    assert pragma and "{" not in before
    assert source.metal_source(path.name).count("fp contract") == 1
