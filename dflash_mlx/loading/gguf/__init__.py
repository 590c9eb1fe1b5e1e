"""GGUF files, converted once into a folder that mlx-lm loads.

`header` reads and checks the file, `mapping` gives its config and weights mlx-lm's names,
`tokenizer` builds the tokenizer from its metadata, `convert` writes the folder.
"""
