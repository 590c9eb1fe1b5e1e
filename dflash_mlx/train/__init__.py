"""Training a drafter for any target.

`run.train` does all of it, from prompts to a drafter on disk: `dflash-mlx train` is its command,
and docs/training.md says how it works. Its parts can be used alone: `data.read_samples`,
`drafter.train_drafter` and `drafter.save_drafter`. The embedded pair is made of them
(`recipes/tiny_pair`).
"""
