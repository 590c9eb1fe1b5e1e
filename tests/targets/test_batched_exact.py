"""Many requests through our kernels: exact verification stays exact in a batch.

In half precision and 4 bits, where the number of rows would show in products that are not ours.
"""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from batches import SharedVerifier, by_proposal, states_are_same
from families import CharacterTokenizer, family_target, random_prompt
from kernel_check import on_gpu_or_emulator, random_parents
from kernel_models import Launches, exact_target

from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target
from dflash_mlx.targets.rows import Rows
from dflash_mlx.targets.span import Span

pytestmark = on_gpu_or_emulator


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_every_request_gets_what_it_gets_alone(family):
    launches = Launches()
    target = exact_target(family, launches)
    verifier = SharedVerifier(target)
    tree = Proposal(random_prompt(5, 2), tuple(random_parents(5)))
    proposals = [Proposal(random_prompt(7, 1)), tree, Proposal([9])]
    together, alone = ([target.start((0, 3)) for _ in proposals] for _ in range(2))
    for session in (*together, *alone):
        list(session.prefill(random_prompt(3, 3)))

    launches.counts.clear()
    expected = [session.verify(each) for session, each in zip(alone, proposals, strict=True)]
    mx.eval(expected)
    apart = dict(launches.counts)
    launches.counts.clear()
    verified = by_proposal(proposals, *verifier.verify(together, proposals))
    mx.eval(verified)
    for (logits, taps), (other, features) in zip(verified, expected, strict=True):
        assert mx.array_equal(logits, other) and mx.array_equal(taps, features)
    for name, count in apart.items():
        one_for_each = name.startswith(("block_attention", "delta"))
        assert launches.counts[name] == (count if one_for_each else count // 3), name
    for session in (*together, *alone):
        session.commit([0])
    assert all(states_are_same(*pair) for pair in zip(together, alone, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_requests_that_do_not_fit_into_one_forward_are_exact(family):
    """Two of these three fit, so the last one has a forward of its own."""
    target = exact_target(family, Launches())
    widths = [target.kernel_plan.widest - 3, 2, 3]
    proposals = [Proposal(random_prompt(width, width)) for width in widths]
    together, alone = ([target.start((0, 3)) for _ in proposals] for _ in range(2))
    for session in (*together, *alone):
        list(session.prefill(random_prompt(3, 3)))
    verified = by_proposal(proposals, *SharedVerifier(target).verify(together, proposals))
    for session, proposal, (logits, taps) in zip(alone, proposals, verified, strict=True):
        expected, features = session.verify(proposal)
        assert mx.array_equal(logits, expected) and mx.array_equal(taps, features)
    for session in (*together, *alone):
        session.commit([0, 1])
    assert all(states_are_same(*pair) for pair in zip(together, alone, strict=True))


def test_another_target_of_the_same_model_changes_nothing():
    """One without kernels reads rows between a verify and its commit, as another thread might."""
    target = exact_target("qwen3_5", Launches())
    stock = Target(target.model, CharacterTokenizer(), config=target.config, name="stock")
    beside, alone = (target.start() for _ in range(2))
    for session in (beside, alone):
        list(session.prefill(random_prompt(3, 3)))
        session.verify(Proposal(random_prompt(7, 1)))
        if session is beside:
            stock.start().verify(Proposal([1, 2]))
        session.commit([0, 1, 2])
    assert states_are_same(beside, alone)


def test_no_more_rows_than_the_kernels_take():
    """Requests share a forward, in their order, as long as their rows fit into it."""
    target = family_target("qwen3")
    kernels = SimpleNamespace(attention=None, on_device=False)
    target.kernel_plan = SimpleNamespace(widest=64, exact=False, rows={}, kernels=kernels)

    def parts(widths: list[int]) -> list[int]:
        """How many requests share each forward."""
        session = target.start()
        rows = Rows([Span(session, Proposal([1] * width)) for width in widths])
        return [len(part.spans) for part in target._split_by_forward(rows, target.sharing)]

    assert parts([40, 24, 1, 63, 2, 64]) == [2, 2, 1, 1]
    assert parts([64]) == [1]
