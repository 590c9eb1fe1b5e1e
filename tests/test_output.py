"""Tables and errors on any terminal."""

import io

from rich.console import Console

from dflash_mlx.cli.output import make_table


def shown(titles, rows, width):
    table = make_table(*titles)
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_figures_are_aligned_on_the_right():
    lines = shown(("model", "size", "fits"), [("a/model", "8.0 GB", "yes")], 40)
    assert lines == ["model      size  fits", "a/model  8.0 GB   yes"]


def test_a_narrow_terminal_folds_the_name_and_loses_no_letter():
    lines = shown(("name", "size"), [("x" * 50, "123.4"), ("y" * 10, "2")], 40)
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("x") == 50 and "123.4" in "".join(lines)
