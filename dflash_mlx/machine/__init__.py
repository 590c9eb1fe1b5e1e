"""This machine: its BLAS, chip, folders and software."""
