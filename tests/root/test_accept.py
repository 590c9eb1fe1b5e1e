"""The walk against brute force: of all root paths that the target agrees with, the longest."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.accept import accept


@st.composite
def trees(draw):
    """A draft tree over few tokens, so that agreement and equal siblings are common."""
    size = draw(st.integers(1, 12))
    tokens = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    choices = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, size)]
    return tokens, parents, choices


def path_to(row: int, parents: list[int]) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def agreed(path: list[int], tokens: list[int], choices: list[int]) -> bool:
    return all(tokens[child] == choices[row] for row, child in zip(path, path[1:], strict=False))


@given(tree=trees())
def test_accept_against_brute_force(tree):
    tokens, parents, choices = tree
    kept, new = accept(tokens, parents, choices)
    assert kept[0] == 0
    assert kept == path_to(kept[-1], parents)
    assert agreed(kept, tokens, choices)
    assert new == [choices[row] for row in kept]
    # Nothing more could have been kept on this path, ...
    children = [row for row in range(len(tokens)) if parents[row] == kept[-1]]
    assert all(tokens[child] != new[-1] for child in children)
    # ... and without equal siblings, which make two subtrees out of one, nothing at all.
    if len({*zip(parents, tokens, strict=True)}) == len(tokens):
        paths = [path_to(row, parents) for row in range(len(tokens))]
        assert len(kept) == max(len(path) for path in paths if agreed(path, tokens, choices))


@given(draft=st.lists(st.integers(0, 1), max_size=15), choices=st.data())
def test_a_chain_keeps_its_longest_agreed_prefix(draft, choices):
    tokens = [9, *draft]
    wanted = choices.draw(
        st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)), label="choices"
    )
    length = 0
    while length < len(draft) and draft[length] == wanted[length]:
        length += 1
    parents = range(-1, len(draft))
    assert accept(tokens, parents, wanted) == ([*range(length + 1)], wanted[: length + 1])
