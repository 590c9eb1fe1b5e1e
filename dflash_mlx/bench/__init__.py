"""Benchmarks: what is compared, on which prompts, and how figures are summed up."""
