"""Entry point that puts a BLAS in place before anything imports MLX."""

import sys

from dflash_mlx.machine.blas import use_fast_blas

if __name__ == "__main__":
    blas = use_fast_blas(flush_denormals=True)
    print(f"BLAS: {blas.name} ({blas.reason})", file=sys.stderr)

    from .run import main

    main()
