"""Every kernel, with every set of constants, checked by clang as strictly as on a Mac.

No GPU is needed: clang compiles the text that MLX would give to Metal, as C++ for OpenCL, which has
Metal's address spaces and Metal 4.1's rule for `this`.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from kernel_models import Recorder, base_name, every_call
from metal_host import CompilationError, strict
from metal_host.wrapper import Wrapper

from dflash_mlx.kernels.source import metal_source

METAL = Path(__file__).parents[2] / "metal"
# The name and body of a struct, and a member that is one of Apple's matrices or holds some.
STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
MATRIX_MEMBER = re.compile(r"^  (?:Fragment|Operand|simdgroup_\w+(?:<.*>)?) \w+(?:\[.*\])*;", re.M)


@pytest.fixture(scope="module")
def calls() -> Recorder:
    return every_call()


@pytest.fixture(scope="module")
def one_of_each_kind(calls) -> list[Wrapper]:
    """One set of constants for each kernel and each combination of its parameters' types."""
    kinds: dict[tuple, Wrapper] = {}
    for wrapper in calls.wrappers.values():
        types = tuple(parameter.type for parameter in wrapper.parameters)
        kinds.setdefault((base_name(wrapper.name), types), wrapper)
    return list(kinds.values())


def test_the_recorded_calls_use_every_kernel_file(calls):
    """Otherwise the tests below would not see all kernels."""
    files = {metal_source(path.name) for path in METAL.glob("*.metal")}
    assert {wrapper.header for wrapper in calls.wrappers.values()} == files
    assert len(calls.wrappers) > 800


def test_every_kernel_compiles_with_every_constant(calls):
    strict.check_strictly(calls.wrappers.values())


def test_kernels_have_no_generic_address_space_and_no_loop_that_is_not_unrolled(one_of_each_kind):
    assert strict.faults(one_of_each_kind) == set()


def test_the_only_unroll_pragma_unrolls_loops_fully():
    """`strict.faults` sees that a loop has a pragma, but not which one."""
    unroll_lines = set()
    for path in METAL.glob("*.*"):
        for line in path.read_text().splitlines():
            code = line.split("//")[0]
            if "unroll" in code:
                unroll_lines.add(line.strip())
    assert unroll_lines == {'#define DFLASH_UNROLL _Pragma("clang loop unroll(full)")'}


def test_structs_with_matrices_have_a_constructor_for_thread_objects():
    """An implicit one takes a generic `this`, which the constructors of Apple's matrices do not."""
    texts = [path.read_text() for path in METAL.glob("*.*")]
    structs = [struct for text in texts for struct in STRUCT.findall(text)]
    with_matrices = {name: body for name, body in structs if MATRIX_MEMBER.search(body)}
    assert {"TileSums", "QueryRows"} <= with_matrices.keys()
    for name, body in with_matrices.items():
        assert f"  {name}() thread {{}}" in body


HEADER = """
#include <metal_stdlib>
using namespace metal;
constexpr constant int kFour = 4;
struct Piece { float values[kFour]; };
struct Rows {
  const device float* data;
  Piece held;
  float at(int i) const thread { return data[i] + held.values[0]; }
  void fill(thread Piece& piece) const thread {
    _Pragma("clang loop unroll(full)")
    for (int i = 0; i < kFour; i++) piece.values[i] = at(i);
  }
};
"""
BODY = """
  constexpr int COUNT = 8;
  threadgroup float shared[32];
  const uint lane = thread_index_in_simdgroup;
  shared[lane] = x[lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Rows rows = {x, {}};
  Piece piece;
  rows.fill(piece);
  float4 sums = float4(0);
  _Pragma("clang loop unroll(full)")
  for (int j = 0; j < 4; j++) {
    const int next = (j + 1) % 4;
    sums[j] += piece.values[next] + shared[lane];
  }
  for (int i = 0; i < COUNT; i++) out[i] = sums[0] + rows.at(i);
"""


def kernel(changes: Iterable[tuple[str, str]] = ()) -> Wrapper:
    """A small kernel, with pieces of its text replaced."""
    header = HEADER
    body = BODY
    for correct, wrong in changes:
        assert (header + body).count(correct) == 1, correct
        header = header.replace(correct, wrong)
        body = body.replace(correct, wrong)
    recorder = Recorder()
    call = recorder("planted", ["x"], ["out"], body, header)
    call([mx.zeros(64)], [(8,)], [mx.float32])
    return next(iter(recorder.wrappers.values()))


def test_a_correct_kernel_has_no_faults():
    assert strict.faults([kernel()]) == set()


# Words that Metal reserves: keywords, and types of its library.
KEYWORDS = """
    vertex fragment kernel device constant thread threadgroup threadgroup_imageblock ray_data
    object_data sampler texture texture1d texture2d texture2d_array texture3d texturecube
    texture_buffer depth2d depthcube imageblock coherent patch_control_point interpolant
    acceleration_structure intersector visible_function_table command_buffer half bfloat double
    float bool int new delete virtual throw goto asm register thread_local typeid
    uint float4 atomic vec size_t simdgroup_matrix mem_flags
""".split()


@pytest.mark.parametrize("word", KEYWORDS)
def test_a_keyword_as_an_identifier_is_refused(word):
    planted = kernel([("const int next =", f"const int {word} ="), ("[next]", f"[{word}]")])
    with pytest.raises(CompilationError):
        strict.check_strictly([planted])


STORE = "inline thread float* store(thread Piece& piece) { return piece.values; }\n"
SHARED = "reinterpret_cast<const device float*>(shared)"
FIRST = "static float first(const float* p) { return p[0]; }\n  "
REFUSED = {
    "a generic `this` where `thread` is asked for": (
        ("void fill(thread Piece& piece) const thread {", "void fill(thread Piece& piece) {"),
        ("piece.values[i] = at(i)", "store(held)[i] = at(i)"),
        ("struct Rows {", f"{STORE}struct Rows {{"),
    ),
    "a device pointer for a threadgroup one": (
        ("const device float* data;", "const threadgroup float* data;"),
    ),
    "a cast to another address space": (
        ("Rows rows = {x, {}};", f"Rows rows = {{{SHARED}, {{}}}};"),
    ),
    "a C cast to another address space": (
        ("Rows rows = {x, {}};", "Rows rows = {(const device float*)shared, {}};"),
    ),
    "a pointer without an address space": (
        ("const device float* data;", "const float* data;"),
        ("Rows rows = {x, {}};", "Rows rows = {x, {}}; const device float* back = rows.data;"),
    ),
    "a choice between values of two types": (
        ("rows.fill(piece);", "piece = lane ? Piece{} : rows;"),
    ),
    "40 KB of threadgroup memory": (("shared[32]", "shared[10240]"),),
    "a double": (("const int next =", "const double twice = 2.0; const int next ="),),
    "a virtual function": (("float at(int i)", "virtual float at(int i)"),),
    "a write to a constant input": (("sums[j] +=", "x[j] = 0; sums[j] +="),),
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
def test_a_text_that_metal_does_not_compile_is_refused(changes):
    with pytest.raises(CompilationError):
        strict.check_strictly([kernel(changes)])


TENSOR_ERRORS = {  # a piece of the text, and what replaces it
    "operands in float": ("tensor<device T, Extents", "tensor<device float, Extents"),
    "words instead of bytes": ("(device uchar*)columns.w.words", "columns.w.words"),
    "k of no whole 32": ("width, GROUP, false", "width, GROUP - 16, false"),
    "8 rows by 8 columns": ("(kTileRows, width, GROUP", "(8, 8, GROUP"),
    "a result that is not named": ("run(x_step, codes, sums)", "run(x_step, codes, {})"),
}


@pytest.mark.parametrize(("correct", "wrong"), TENSOR_ERRORS.values(), ids=TENSOR_ERRORS.keys())
def test_wrong_arguments_of_tensor_operations_are_refused(calls, correct, wrong):
    wrapper = next(
        wrapper for wrapper in calls.wrappers.values() if "matmul_tensor" in wrapper.name
    )
    assert wrapper.header.count(correct) == 1
    planted = replace(wrapper, header=wrapper.header.replace(correct, wrong))
    with pytest.raises(CompilationError):
        strict.check_strictly([planted])


PICK = "float pick(int i) const thread { return held.values[i]; }\n  "
UNROLL = '_Pragma("clang loop unroll(full)")\n'
FAULTS = {  # changes of the text, and a part of the fault's message
    "a generic `this` that compiles": (
        (("float at(int i) const thread", "float at(int i) const"),),
        "4Rows2at",
    ),
    "a pointer without an address space": (
        (
            ("float at(int i)", f"{FIRST}float at(int i)"),
            ("= sums[0] +", "= Rows::first(piece.values) +"),
        ),
        "4Rows5first",
    ),
    "a loop over an array that is not unrolled": (
        ((UNROLL + "    for (int i", "    for (int i"),),
        "getelementptr",
    ),
    "a loop that fills an array": (
        (("Piece piece;", "Piece piece; for (int i = 0; i < 4; i++) piece.values[i] = 0;"),),
        "getelementptr",
    ),
    "a loop over a vector that is not unrolled": (
        ((UNROLL + "  for (int j", "  for (int j"),),
        "element <4 x float>",
    ),
    "an index that a thread decides": (
        (("= sums[0] +", "= sums[lane % 4] +"),),
        "extractelement <4 x float>",
    ),
    "an index that some callers know and another does not": (
        (
            ("float at(int i)", f"{PICK}float at(int i)"),
            ("= sums[0] + rows.at(i);", "= rows.pick(2) + rows.pick(i);"),
        ),
        "getelementptr",
    ),
    "an unrolled loop whose length is not known": (
        (("j < 4; j++", "j < int(lane); j++"),),
        "element <4 x float>",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found_in_a_text_that_compiles(changes, message):
    """Generic address spaces, and loops or indices that keep an array out of registers."""
    faults = strict.faults([kernel(changes)])
    assert any(message in fault for fault in faults), faults


def test_a_fault_names_its_line():
    (fault,) = strict.faults([kernel([("float at(int i) const thread", "float at(int i) const")])])
    assert "float at" in HEADER.splitlines()[int(fault.split(":")[0]) - 1]
