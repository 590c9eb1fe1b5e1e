"""Acceptance: starting at the root, follow the child that equals the target's choice.

One rule serves chains and trees, greedy and sampled: the choices already contain the noise.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(
    tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Follow the target through a draft tree.

    Args:
        tokens: [N] the proposal's token ids, the anchor first.
        parents: [N] the row of each node's parent, -1 for the root. Parents precede children.
        choices: [N] the token that the target chose after each node's path.

    Returns:
        The kept rows from the root down, and the token that the target chose after each of them.
        These are the new tokens; the last one is the next anchor.
    """
    kept = [0]
    new = [choices[0]]
    for row in range(1, len(tokens)):
        # Children come after their parents, so one pass finds the whole path. If siblings repeat a
        # token, the first one wins.
        if parents[row] == kept[-1] and tokens[row] == new[-1]:
            kept.append(row)
            new.append(choices[row])
    return kept, new
