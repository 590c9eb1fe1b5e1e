"""Training: the recipe of the embedded pair, and a drafter trainer for any target.

`python -m dflash_mlx.train` remakes the embedded pair. To train a drafter for another target,
read a data file with `data.read_samples` (`regenerate.regenerate_file` first lets the target
answer it itself), then call `drafter.train_drafter` and `drafter.save_drafter`.
"""
