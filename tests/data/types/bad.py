"""As good.py, but every line from the first call on has a mistake that mypy has to find."""

import dflash_mlx as dm

target, drafter = dm.load("tiny")
dm.generate(target, drafter, "Once", max_token=3)
dm.generate(target, drafter, "Once", max_tokens="3")
dm.generate(target, drafter, "Once", repetition_penalti=1.1)
dm.stream_generate(target, drafter, "Once", logit_bias=3)
print(dm.generate(target, drafter, "Once").txt)
