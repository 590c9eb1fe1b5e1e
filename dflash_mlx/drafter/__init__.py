"""Drafters: the networks that propose a block of tokens in one pass."""
