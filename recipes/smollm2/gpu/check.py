"""Entry point of comparison.py that puts a BLAS in place before anything imports MLX."""

from dflash_mlx.machine.blas import use_fast_blas

if __name__ == "__main__":
    use_fast_blas(flush_denormals=True)

    from .comparison import main

    main()
