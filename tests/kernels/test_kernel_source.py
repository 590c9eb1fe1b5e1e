"""The source of a kernel as MLX gets it: one ASCII text with every local include inlined once."""

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


def test_comments_indentation_and_empty_lines_are_removed(folder):
    (folder / "kernel.metal").write_text("// why\n\nint f() {\n  return 1;  // one\n}\n")
    assert source.metal_source("kernel.metal") == "int f() {\nreturn 1;\n}\n"


def test_a_character_outside_ascii_is_refused(folder):
    (folder / "kernel.metal").write_text("// 16 × 8\n", encoding="utf-8")
    with pytest.raises(KernelError, match="metal/kernel.metal has a character outside ASCII"):
        source.metal_source("kernel.metal")


@metal_host.needs_compiler
@pytest.mark.parametrize("name", sorted(p.name for p in METAL.glob("*.*") if p.suffix != ".py"))
def test_every_file_compiles_by_itself(name):
    """A file includes all that it uses; Metal's headers are replaced by the emulator's.

    This is what `xcrun -sdk macosx metal -c` checks on a Mac. Templates are compiled where kernels
    are tested.
    """
    Build().check_syntax(METAL / name)


def test_inputs_of_fewer_than_8_elements_are_padded():
    """MLX would put them into `constant` memory, where a kernel's `device` pointer cannot point."""
    small = mx.array([[1, 2, 3]])
    large = mx.ones((2, 4))
    assert in_device_memory(small).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert in_device_memory(large) is large


@pytest.mark.parametrize("path", sorted(METAL.glob("*.metal")), ids=lambda path: path.name)
def test_a_file_forbids_the_compiler_to_fuse_multiplications_and_additions(path):
    """Otherwise one instance of a template may round a product that another one does not."""
    before, pragma, _ = source.metal_source(path.name).partition("#pragma METAL fp contract(off)\n")
    assert pragma and "{" not in before
    assert source.metal_source(path.name).count("fp contract") == 1
