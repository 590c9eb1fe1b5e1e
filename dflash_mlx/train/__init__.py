"""Training a drafter for any target: `run.train`, the command `dflash-mlx train`.

docs/training.md explains it. Its parts can be used alone, like `drafter.train_drafter` and
`drafter.save_drafter`; `recipes/tiny_pair` trains the embedded pair with them.
"""
