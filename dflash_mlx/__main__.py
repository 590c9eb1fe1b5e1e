"""`python -m dflash_mlx` is the command `dflash-mlx`."""

from .cli.main import main

if __name__ == "__main__":
    main()
