"""Models in GGUF files: read with care, converted once into a folder that mlx-lm loads.

`header` judges the file, `config` and `weights` say what mlx-lm calls its parts, `tokenizer` builds
the tokenizer from its metadata, `convert` keeps the result; `packages` finds models that come as
Python packages.
"""
