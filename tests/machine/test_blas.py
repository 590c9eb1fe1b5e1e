"""The BLAS is put under MLX before MLX is imported, so every case here is a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx.errors import SettingsError
from dflash_mlx.machine import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX uses Accelerate elsewhere")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)
needs_numpy_openblas = pytest.mark.skipif(
    not any(name == "numpy-openblas" for name, *_ in blas._openblas_libraries()),
    reason="numpy without OpenBLAS",
)

USE = "from dflash_mlx.machine.blas import use_fast_blas; info = use_fast_blas({}); print(info);"
NO_SYSTEM = "import dflash_mlx.machine.blas; dflash_mlx.machine.blas._SYSTEM_NAMES = ();"
# 1e-20 * 1e-20 is a denormal: only the product of two matrices can turn the flushing on.
DENORMAL = """
import mlx.core as mx
with mx.stream(mx.cpu):
    mx.eval(mx.ones((3, 4)) @ mx.ones((4, 5)))
    print("kept" if (mx.array([1e-20]) * mx.array([1e-20])).item() > 0 else "flushed")
"""
PRODUCT = """
import mlx.core as mx, numpy as np
with mx.stream(mx.cpu):
    for dtype in (mx.float32, mx.float64):
        a = mx.arange(6, dtype=dtype).reshape(2, 3); b = mx.arange(12, dtype=dtype).reshape(3, 4)
        wide = mx.concatenate([b, b], axis=1)[:, 2:6]          # a row is not where the last ended
        for left, right in ((a, b), (a, wide), (b.T, a.T)):
            assert np.array_equal(np.array(left @ right), np.array(left) @ np.array(right))
    print("right")
"""


def run(code: str, home: Path, **variables: str) -> str:
    """What `code` prints in a new process with an empty home folder."""
    environment = {**os.environ, "HOME": str(home), **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bindings(code: str, home: Path) -> list[str]:
    """The dynamic linker's own record of where MLX's cblas_sgemm went."""
    run(code, home, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(home / "bindings"))
    lines = [line for log in home.glob("bindings.*") for line in log.read_text().splitlines()]
    return [line for line in lines if "libmlx.so" in line and "`cblas_sgemm'" in line]


@linux
@needs_compiler
@needs_numpy_openblas
def test_mlx_takes_the_shim(tmp_path):
    code = NO_SYSTEM + USE.format("") + PRODUCT
    taken = bindings(code, tmp_path)
    assert taken and all(" to " in line and "/shim-" in line.split(" to ")[1] for line in taken)
    output = run(code, tmp_path)
    assert "name='numpy-openblas'" in output and "right" in output


@linux
def test_stock_stays_stock(tmp_path):
    taken = bindings(USE.format("stock=True") + PRODUCT, tmp_path)
    assert taken and not any("/shim-" in line or "openblas" in line for line in taken)
    assert not (tmp_path / ".cache").exists()


@pytest.fixture
def system(tmp_path):
    """Code that puts a library with OpenBLAS's names in the place of the system's."""
    source = """
        #include <stdio.h>
        char *openblas_get_config(void) { return "OpenBLAS 0.3"; }
        void openblas_set_num_threads(int n) { printf("threads %d\\n", n); fflush(stdout); }
        void cblas_dgemm(void) {}
        void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float x, const float *a,
                         int lda, const float *b, int ldb, float y, float *c, int ldc) {
            for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i * ldc + j] = 42;
        }
    """
    library = tmp_path / "libopenblas.so.0"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source.encode(), check=True)
    module = "dflash_mlx.machine.blas"
    return f"import {module}; {module}._SYSTEM_NAMES = ({str(library)!r},);"


@linux
@needs_compiler
def test_a_system_library_goes_first(tmp_path, system):
    """In both ways of reaching it."""
    product = "import mlx.core as mx; print((mx.ones((2, 3)) @ mx.ones((3, 4))).tolist())"
    for settings in ("threads=2", "threads=2, flush_denormals=True"):
        output = run(system + USE.format(settings) + product, tmp_path)
        assert (
            "threads 2" in output and "name='openblas'" in output and "libopenblas.so.0" in output
        )
        assert str([[42.0] * 4] * 2) in output
        assert f"flushes_denormals={'flush' in settings}" in output


@linux
@needs_compiler
@needs_numpy_openblas
def test_denormals_are_flushed_only_on_request(tmp_path):
    assert "kept" in run(NO_SYSTEM + USE.format("") + DENORMAL, tmp_path)
    flushed = run(NO_SYSTEM + USE.format("flush_denormals=True") + DENORMAL, tmp_path)
    assert "flushed" in flushed and "flushes_denormals=True" in flushed


@linux
@needs_numpy_openblas
def test_no_compiler_leaves_the_stock_blas(tmp_path):
    output = run(NO_SYSTEM + USE.format("") + PRODUCT, tmp_path, PATH="")
    assert "name='stock'" in output and "no C compiler" in output and "right" in output


@linux
@needs_compiler
def test_without_a_compiler_a_system_library_keeps_denormals(tmp_path, system):
    output = run(system + USE.format("flush_denormals=True"), tmp_path, PATH="")
    assert "name='openblas'" in output and "flushes_denormals=False" in output
    assert "denormals are not flushed: there is no C compiler" in output


@linux
@needs_numpy_openblas
def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path):
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'cc: out of luck' >&2\nexit 1\n")
    fake.chmod(0o755)
    output = run(NO_SYSTEM + USE.format(""), tmp_path, PATH=f"{fake.parent}:/usr/bin:/bin")
    assert "name='stock'" in output and "out of luck" in output
    assert not list((tmp_path / ".cache/dflash-mlx/blas").iterdir())


@linux
@needs_compiler
@needs_numpy_openblas
def test_without_a_place_to_keep_it_the_shim_is_built_for_one_process(tmp_path):
    (tmp_path / ".cache").write_text("a file where a folder should be")
    (tmp_path / "tmp").mkdir()
    output = run(NO_SYSTEM + USE.format("") + PRODUCT, tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert "name='numpy-openblas'" in output and "right" in output
    assert not list((tmp_path / "tmp").iterdir())


@linux
@needs_compiler
@needs_numpy_openblas
def test_the_shim_is_built_once_and_only_trusted_when_private(tmp_path):
    code = NO_SYSTEM + USE.format("")
    environment = {**os.environ, "HOME": str(tmp_path)}
    together = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in together:
        assert b"name='numpy-openblas'" in process.communicate(timeout=120)[0]
    (shim,) = (tmp_path / ".cache/dflash-mlx/blas").iterdir()
    assert shim.stat().st_mode & 0o777 == 0o700 and shim.parent.stat().st_mode & 0o777 == 0o700

    built = shim.stat().st_mtime_ns
    run(code, tmp_path, PATH="")  # no compiler is needed any more
    assert shim.stat().st_mtime_ns == built
    shim.chmod(0o777)
    assert "others can write" in run(code, tmp_path)


@linux
@needs_compiler
@needs_numpy_openblas
def test_a_second_call_reports_what_is_in_place(tmp_path):
    """As where a notebook's cell runs again, when MLX has long been imported."""
    code = NO_SYSTEM + USE.format("") + "import mlx.core;" + USE.format("stock=True")
    output = run(code, tmp_path)
    assert "name='preloaded'" in output.splitlines()[1]


@linux
def test_too_late_after_mlx(tmp_path):
    pytest.importorskip("mlx.core")
    code = """
import mlx.core, dflash_mlx as dm
from dflash_mlx.errors import SettingsError
try: dm.use_fast_blas()
except SettingsError as error: print(error)
print(dm.use_fast_blas(stock=True).name)
"""
    late, stock = run(code, tmp_path).splitlines()
    assert "already imported" in late
    assert stock == "stock"  # what is there is what is asked for


@pytest.mark.parametrize("threads", [0, -(10**5000), "2", 1.5, True, None], ids=type)
def test_threads_are_checked(threads):
    with pytest.raises(SettingsError, match="threads must be a whole number, 1 or more"):
        blas.use_fast_blas(threads=threads)


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS only")
def test_macos_keeps_accelerate():
    assert blas.use_fast_blas().name == "accelerate"
