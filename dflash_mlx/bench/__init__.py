"""Measuring honestly: what is compared, on which prompts, and how the numbers are summed up.

Nothing here prints; the command line draws the tables.
"""
