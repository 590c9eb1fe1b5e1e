"""The BLAS is put under MLX before MLX is imported, so most tests start a new process."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dflash_mlx.errors import SettingsError
from dflash_mlx.machine import blas
from dflash_mlx.machine.blas_proof import dependent_rows, other_bits

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX uses Accelerate elsewhere")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)
KERNELS = list(blas._X86_KERNELS) if os.uname().machine == "x86_64" else ["neon"]
SOURCE = Path(blas.__file__).with_name("blas_shim.c").read_bytes()
USE = "from dflash_mlx.machine.blas import use_fast_blas; info = use_fast_blas({}); print(info);"
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
        wide = mx.concatenate([b, b], axis=1)[:, 2:6]          # its rows are not contiguous
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
    """The lines of the dynamic linker's log that say which library MLX's cblas_sgemm is from."""
    run(code, home, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(home / "bindings"))
    lines = [line for log in home.glob("bindings.*") for line in log.read_text().splitlines()]
    return [line for line in lines if "libmlx.so" in line and "`cblas_sgemm'" in line]


@linux
@needs_compiler
def test_mlx_multiplies_with_our_library(tmp_path):
    code = USE.format("") + PRODUCT
    lines = bindings(code, tmp_path)
    assert lines
    for line in lines:
        library = line.split(" to ")[1]
        assert "/shim-" in library
    output = run(code, tmp_path)
    assert "name='dflash-" in output and "right" in output


@linux
def test_with_stock_mlx_keeps_its_own_blas(tmp_path):
    lines = bindings(USE.format("stock=True") + PRODUCT, tmp_path)
    assert lines and not any("/shim-" in line or "openblas" in line for line in lines)
    assert not (tmp_path / ".cache").exists()


@linux
@needs_compiler
def test_denormals_are_flushed_only_on_request(tmp_path):
    assert "kept" in run(USE.format("") + DENORMAL, tmp_path)
    flushed = run(USE.format("flush_denormals=True") + DENORMAL, tmp_path)
    assert "flushed" in flushed and "flushes_denormals=True" in flushed


@linux
def test_no_compiler_leaves_the_stock_blas(tmp_path):
    output = run(USE.format("") + PRODUCT, tmp_path, PATH="")
    assert "name='stock'" in output and "no C compiler" in output and "right" in output


@linux
def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path):
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    version = 'if [ "$1" = --version ]; then echo cc 1; exit; fi'
    fake.write_text(f"#!/bin/sh\n{version}\necho 'cc: out of luck' >&2\nexit 1\n")
    fake.chmod(0o755)
    output = run(USE.format(""), tmp_path, PATH=f"{fake.parent}:/usr/bin:/bin")
    assert "name='stock'" in output and "out of luck" in output
    assert not list((tmp_path / ".cache/dflash-mlx/blas").iterdir())


@linux
@needs_compiler
def test_without_a_cache_folder_the_library_is_built_for_one_process(tmp_path):
    (tmp_path / ".cache").write_text("a file where a folder should be")
    (tmp_path / "tmp").mkdir()
    output = run(USE.format("") + PRODUCT, tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert "name='dflash-" in output and "right" in output
    assert not list((tmp_path / "tmp").iterdir())


@linux
@needs_compiler
def test_the_library_is_built_once_and_only_used_if_nobody_else_can_write_it(tmp_path):
    """Three processes start at the same time; a later one finds what they built."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", USE.format("")]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for process in processes:
        assert b"name='dflash-" in process.communicate(timeout=120)[0]
    (shim,) = (tmp_path / ".cache/dflash-mlx/blas").iterdir()
    assert shim.stat().st_mode & 0o777 == 0o700 and shim.parent.stat().st_mode & 0o777 == 0o700

    built = shim.stat().st_mtime_ns
    run(command[-1], tmp_path, PATH="")  # no compiler is needed any more
    assert shim.stat().st_mtime_ns == built
    shim.chmod(0o777)
    assert "others can write" in run(command[-1], tmp_path)


def path_with_compiler(folder: Path, version: str) -> str:
    """A PATH whose `cc` calls the real one, logs its calls, and reports this version."""
    folder.mkdir()
    script = folder / "cc"
    script.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
if [ "$1" = --version ]; then echo "{version}"; else exec {shutil.which("cc")} "$@"; fi
"""
    )
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@linux
@needs_compiler
def test_each_version_of_the_compiler_builds_its_own_library(tmp_path):
    older = path_with_compiler(tmp_path / "98.1", "cc (Some) 98.1")
    newer = path_with_compiler(tmp_path / "99.2", "cc (Some) 99.2")
    for path in (older, newer, older):
        assert "name='dflash-" in run(USE.format(""), tmp_path, PATH=path)
    first, second = sorted(file.name for file in (tmp_path / ".cache/dflash-mlx/blas").iterdir())
    assert first.endswith("98.1.so") and second.endswith("99.2.so")
    calls = (tmp_path / "98.1/calls").read_text().splitlines()
    builds = [call for call in calls if " -o " in call]
    assert len(builds) == 1, "the older compiler's library was built twice"


@linux
@needs_compiler
def test_the_compiler_may_not_fuse_multiplications_and_additions(tmp_path):
    """Otherwise its version would decide which products are rounded once, and so their bits."""
    run(USE.format(""), tmp_path, PATH=path_with_compiler(tmp_path / "bin", "cc 1"))
    builds = [call for call in (tmp_path / "bin/calls").read_text().splitlines() if " -o " in call]
    assert builds and all("-ffp-contract=off" in call.split() for call in builds)
    assert not any("-Ofast" in call or "-ffast-math" in call for call in builds)
    sources = [
        path.name
        for path in Path(blas.__file__).parents[1].rglob("*")
        if path.suffix in (".c", ".cc", ".cpp", ".cu", ".m", ".mm")
    ]
    # Another source needs such a test as well. Those of Metal have test_kernel_source.py.
    assert sources == ["blas_shim.c"]


# For each flaw, the operations that are not fused in a wrong library.
FAULTS = {
    # As gcc 13 to 16 compiled it without the option: single rows, which use quads, had other bits.
    "a row of a product depends on the other rows": ("fma_quad",),
    "its products have other bits than on other machines": ("fma_quad", "fma_vector"),
}


@linux
@needs_compiler
@pytest.mark.parametrize("flaw", FAULTS)
def test_a_wrong_library_is_refused(tmp_path, flaw):
    kernel, flags = blas._kernel()
    if kernel not in ("avx512", "avx2") and len(FAULTS[flaw]) == 1:
        pytest.skip(f"{kernel} has one kind of vectors")
    run(USE.format(""), tmp_path)
    (library,) = (tmp_path / ".cache/dflash-mlx/blas").iterdir()
    macros = [f"#define {name}(a, b, c) ((a) * (b) + (c))\n" for name in FAULTS[flaw]]
    start = SOURCE.index(b"/* c [m, n] = ")
    wrong = SOURCE[:start] + "".join(macros).encode() + SOURCE[start:]
    blas._compile(wrong, flags, library)

    output = run(USE.format("") + PRODUCT, tmp_path)
    assert "name='stock'" in output and flaw in output and "right" in output
    assert f"delete {library}" in output and re.search(r"(gcc|clang) \d+\.\d+", output)
    doctor = "from dflash_mlx.cli.main import main; import sys; sys.argv[1:] = ['doctor']; main()"
    shown = " ".join(run(doctor, tmp_path, COLUMNS="500").split())
    assert "warn BLAS stock: dflash-mlx's own is not used: " in shown and flaw in shown


@linux
@needs_compiler
def test_doctor_says_which_compiler_built_it(tmp_path):
    doctor = "from dflash_mlx.cli.main import main; import sys; sys.argv[1:] = ['doctor']; main()"
    shown = " ".join(run(doctor, tmp_path, COLUMNS="500").split())
    assert re.search(r"ok BLAS dflash-\w+: built for this processor by (gcc|clang) \d+\.", shown)


@linux
@needs_compiler
def test_a_processor_without_fused_multiply_add_keeps_mlx_products(tmp_path):
    without = "import dflash_mlx.machine.blas as blas; blas._X86_KERNELS = {}; "
    if os.uname().machine == "x86_64":
        output = run(without + USE.format("") + PRODUCT, tmp_path)
        assert "name='stock'" in output and "no fused multiply-add" in output and "right" in output
        with pytest.raises(blas._NoShim, match="no instruction that multiplies and adds at once"):
            blas._compile(SOURCE, [], tmp_path / "shim.so")


@linux
@needs_compiler
def test_loading_without_fast_products_warns_once(tmp_path):
    load = "import warnings, dflash_mlx as dm\n"
    load += "with warnings.catch_warnings(record=True) as caught:\n"
    load += "    for _ in range(2): dm.load('tiny'); dm.load_target('tiny')\n"
    load += "print([str(warning.message) for warning in caught])"
    assert run(load, tmp_path).count("call dflash_mlx.use_fast_blas() before anything") == 1
    assert run(USE.format("") + "\n" + load, tmp_path).splitlines()[1] == "[]"


@linux
def test_use_fast_blas_is_an_error_after_mlx_is_imported_unless_it_was_called_before(tmp_path):
    """A notebook's cell may call it a second time. `stock=True` asks for what is there anyway."""
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
    assert stock == "stock"
    again = USE.format("") + "import mlx.core;" + USE.format("stock=True")
    assert "name='preloaded'" in run(again, tmp_path).splitlines()[1]


@pytest.mark.parametrize("threads", [0, -(10**5000), "2", 1.5, True, None], ids=type)
def test_threads_are_checked(threads):
    with pytest.raises(SettingsError, match="threads must be a whole number, 1 or more"):
        blas.use_fast_blas(threads=threads)


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS only")
def test_macos_keeps_accelerate():
    assert blas.use_fast_blas().name == "accelerate"


# Products

# [n, k] of the weights of a layer: SmolLM2-135M, Qwen3-0.6B and Gemma 3 270M, and odd ones. Heads
# are cut to 1,000 rows.
SHAPES = {(576, 576), (192, 576), (1536, 576), (576, 1536), (1000, 576)}
SHAPES |= {(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (1000, 1024)}
SHAPES |= {(1024, 640), (256, 640), (640, 1024), (2048, 640), (640, 2048), (1000, 640)}
SHAPES |= {(1, 1), (5, 3), (7, 18), (23, 64), (64, 301), (33, 2051), (40, 5000)}


@pytest.fixture(scope="module", params=KERNELS)
def sgemm(request, tmp_path_factory):
    """cblas_sgemm of one kernel, for numpy arrays. Kernels are ordered from the newest on."""
    kernel = request.param
    best_kernel = blas._kernel()[0]
    kernels_not_older = KERNELS[: KERNELS.index(kernel) + 1]
    if sys.platform != "linux" or best_kernel not in kernels_not_older:
        pytest.skip(f"this processor has {best_kernel}")
    path = tmp_path_factory.mktemp("kernel") / "shim.so"
    flags = [f"-m{flag}" for flag in blas._X86_KERNELS.get(kernel, ())]
    blas._compile(SOURCE, flags, path)
    library = ctypes.CDLL(str(path))
    assert not dependent_rows(library)
    assert not other_bits(library), "the bits depend on the width of the vectors"
    size = ctypes.c_int
    number = ctypes.c_float
    array = np.ctypeslib.ndpointer(np.float32)
    library.cblas_sgemm.argtypes = [size] * 6 + [number, array, size, array, size, number]
    library.cblas_sgemm.argtypes += [array, size]

    def multiply(a, b, ta=False, tb=False, alpha=1.0, beta=0.0, c=None, threads=1, order=101):
        m, k = a.shape[::-1] if ta else a.shape
        n = b.shape[0 if tb else 1]
        c = np.full((m, n), np.nan, np.float32) if c is None else c.copy()
        library.dflash_configure(threads, 0)
        sizes = (order, 112 if ta else 111, 112 if tb else 111, m, n, k, alpha)
        library.cblas_sgemm(*sizes, a, a.shape[1], b, b.shape[1], beta, c, n)
        return c

    return multiply


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@needs_compiler
@pytest.mark.parametrize("n, k", sorted(SHAPES))
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(sgemm, n, k):
    """It does not depend on the order of the weights in memory or the number of threads either."""
    x = numbers(70, k)
    w = numbers(n, k)
    alone = np.concatenate([sgemm(x[row : row + 1], w, tb=True) for row in range(len(x))])
    np.testing.assert_allclose(alone, x.astype(float) @ w.T.astype(float), atol=2e-5 * k**0.5)
    for rows in [*range(2, 17), 33, 64, 65, 70]:
        assert np.array_equal(sgemm(x[:rows], w, tb=True), alone[:rows]), rows
    by_column = np.ascontiguousarray(w.T)
    for rows, threads in product((1, 4, 16, 70), (1, 3)):
        assert np.array_equal(sgemm(x[:rows], by_column, threads=threads), alone[:rows])
        assert np.array_equal(sgemm(x[:rows], w, tb=True, threads=threads), alone[:rows])


@needs_compiler
def test_values_with_a_weight_of_zero_change_no_bit(sgemm):
    """In a step of several rows, a row reads the values of later tokens, with weights of 0."""
    weights = numbers(3, 50)
    values = numbers(50, 64)
    weights[:, 41:] = 0
    assert np.array_equal(sgemm(weights, values), sgemm(weights[:, :41].copy(), values[:41]))


@needs_compiler
@pytest.mark.parametrize("ta, tb", product((False, True), repeat=2))
@pytest.mark.parametrize("m, n, k", [(1, 1, 0), (3, 5, 7), (17, 40, 33), (80, 21, 90)])
def test_products_of_transposed_and_scaled_matrices(sgemm, ta, tb, m, n, k):
    a = numbers(*((k, m) if ta else (m, k)))
    b = numbers(*((n, k) if tb else (k, n)))
    c = numbers(m, n)
    want = (a.T if ta else a) @ (b.T if tb else b)
    np.testing.assert_allclose(sgemm(a, b, ta, tb), want, atol=1e-4)
    scaled = sgemm(a, b, ta, tb, alpha=0.5, beta=-2.0, c=c)
    np.testing.assert_allclose(scaled, 0.5 * want - 2 * c, atol=1e-4)
