"""The embedded pair: weights, tokenizer and held-out prompts; see README.md beside this file."""
