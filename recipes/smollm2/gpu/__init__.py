"""The same recipe in PyTorch, for a machine with one large GPU; README.md in the folder above."""
