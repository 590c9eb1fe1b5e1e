"""Write every kernel as MLX would hand it to Metal, with every set of template arguments.

    python scripts/write_metal.py build/metal
    xcrun -sdk macosx metal -std=metal3.2 -Werror -c build/metal/block_attention.metal -o /dev/null

A compiler does not check a template before it is used. So these files have the functions that MLX
writes to call the kernels in every form (`Kernels.instances`), a file for each source that kernels
share.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from kernel_models import base_name, every_call

# What the kernels use of MLX's own prelude to a custom kernel.
PRELUDE = """#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    functions: dict[str, list[str]] = {}  # by the header that they share
    names: dict[str, str] = {}  # of the headers' files
    for wrapper in every_call().wrappers.values():
        header = wrapper.header
        names.setdefault(header, f"{base_name(wrapper.name.removeprefix('custom_kernel_'))}.metal")
        functions.setdefault(header, []).append(wrapper.text.removeprefix(header))
    for header, texts in functions.items():
        (folder / names[header]).write_text("".join([PRELUDE, header, *texts]))
        print(f"{folder / names[header]}: {len(texts)} kernels")


if __name__ == "__main__":
    main()
