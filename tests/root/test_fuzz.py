"""A few of the damaged files that `python tests/helpers/fuzz.py` makes by the hundreds."""

import pytest
from fuzz import KINDS, run


@pytest.mark.parametrize("number", range(100, 106))
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_right_text_a_miss_or_one_line(kind, number):
    run(kind, number)
