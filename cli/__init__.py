"""The command line. Typer and Rich live here and nowhere else."""
