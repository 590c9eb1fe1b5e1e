"""GGUF files, converted once into a folder that mlx-lm loads.

`convert` keeps the folders; `conversion` makes one: `header` reads and checks the file,
`architectures` gives its config, `layout` the names and order of its weights, `blocks` their form,
`tokenizer` builds the tokenizer from its metadata.
"""
