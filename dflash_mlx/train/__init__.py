"""Training a drafter for any target.

Read a data file with `data.read_samples` (`regenerate.regenerate_file` first lets the target
answer it itself), then call `drafter.train_drafter` and `drafter.save_drafter`. The embedded pair
is made so: `dflash_mlx.tiny.recipe`.
"""
