"""Many requests through our kernels: exact verification is exact beside others, too.

In half precision and 4 bits, where the number of rows would show in products that are not ours.
"""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from batches import by_proposal, states_are_same
from families import family_target, random_prompt
from kernel_check import on_gpu_or_emulator, random_parents
from kernel_models import Launches, exact_target

from dflash_mlx.proposal import Proposal
from dflash_mlx.targets.batched import BatchVerifier

pytestmark = on_gpu_or_emulator


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_every_request_is_as_alone(family):
    launches = Launches()
    target = exact_target(family, launches)
    verifier = BatchVerifier(target)
    tree = Proposal(random_prompt(5, 2), tuple(random_parents(5)))
    proposals = [Proposal(random_prompt(7, 1)), tree, Proposal([9])]
    together, alone = ([target.start((0, 3)) for _ in proposals] for _ in range(2))
    for session in (*together, *alone):
        list(session.prefill(random_prompt(3, 3)))

    launches.counts.clear()
    expected = [session.verify(each) for session, each in zip(alone, proposals, strict=True)]
    mx.eval(expected)
    three = dict(launches.counts)
    launches.counts.clear()
    verified = by_proposal(proposals, *verifier.verify(together, proposals))
    mx.eval(verified)
    for (logits, taps), (other, features) in zip(verified, expected, strict=True):
        assert mx.array_equal(logits, other) and mx.array_equal(taps, features)
    for name, count in three.items():
        each = name.startswith(("block_attention", "delta"))
        assert launches.counts[name] == (count if each else count // 3), name
    for session in (*together, *alone):
        session.commit([0])
    assert all(states_are_same(*pair) for pair in zip(together, alone, strict=True))


def test_no_more_rows_than_the_kernels_take():
    """Requests go together as long as all their rows do."""
    target = family_target("qwen3")
    verifier = BatchVerifier(target)
    target.wiring = SimpleNamespace(widest=64)
    assert list(verifier._forwards([40, 24, 1, 63, 2, 64])) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert list(verifier._forwards([])) == []
