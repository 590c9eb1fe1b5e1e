"""Write every kernel as MLX would hand it to Metal, with every set of template arguments.

    python scripts/write_metal.py build/metal
    xcrun -sdk macosx metal -std=metal3.2 -Werror -c build/metal/block_attention.metal -o /dev/null

Compiled by itself a source shows what its templates look like, not what becomes of them. These
files, one for each source, hold the functions that MLX writes around the kernels and their
instances; tests/helpers/kernel_calls.py says how they are found.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from kernel_calls import every_call

from dflash_mlx.kernels.source import metal_source

# What the kernels use of MLX's own prelude to a custom kernel.
PRELUDE = """#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""
METAL = Path(__file__).parents[1] / "metal"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    names = {metal_source(path.name): path.name for path in METAL.glob("*.metal")}
    texts = {header: [PRELUDE, header] for header in names}
    for wrapper in every_call().wrappers.values():
        texts[wrapper.header].append(wrapper.text.removeprefix(wrapper.header))
    for header, parts in texts.items():
        (folder / names[header]).write_text("".join(parts))
        print(f"{folder / names[header]}: {len(parts) - 2} kernels")


if __name__ == "__main__":
    main()
