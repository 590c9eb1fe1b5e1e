"""The embedded pair: weights, tokenizer and held-out prompts; see README.md in this folder."""
