"""Many requests through our kernels: exact verification stays exact in a batch.

The targets are half precision with 4-bit weights, where MLX's own matrix products would give
other bits for another number of rows.
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
def test_a_batch_gives_each_request_the_bits_of_verifying_it_alone(family):
    """And it launches each kernel once, except those that attend or recur for each request."""
    launches = Launches()
    target = exact_target(family, launches)
    verifier = SharedVerifier(target)
    tree = Proposal(random_prompt(5, 2), tuple(random_parents(5)))
    proposals = [Proposal(random_prompt(7, 1)), tree, Proposal([9])]
    together = [target.start((0, 3)) for _ in proposals]
    alone = [target.start((0, 3)) for _ in proposals]
    for session in (*together, *alone):
        list(session.prefill(random_prompt(3, 3)))

    launches.counts.clear()
    expected = [
        session.verify(proposal) for session, proposal in zip(alone, proposals, strict=True)
    ]
    mx.eval(expected)
    launches_alone = dict(launches.counts)
    launches.counts.clear()
    verified = by_proposal(proposals, *verifier.verify(together, proposals))
    mx.eval(verified)
    for (logits, taps), (expected_logits, expected_taps) in zip(verified, expected, strict=True):
        assert mx.array_equal(logits, expected_logits)
        assert mx.array_equal(taps, expected_taps)
    for name, count in launches_alone.items():
        once_per_request = name.startswith(("block_attention", "delta"))
        expected_count = count if once_per_request else count // len(proposals)
        assert launches.counts[name] == expected_count, name
    for session in (*together, *alone):
        session.commit([0])
    assert all(states_are_same(*pair) for pair in zip(together, alone, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_requests_that_do_not_fit_into_one_forward_are_exact(family):
    """Two of these three fit into one forward, so the last request gets a second forward."""
    target = exact_target(family, Launches())
    widths = [target.kernel_plan.widest - 3, 2, 3]
    proposals = [Proposal(random_prompt(width, width)) for width in widths]
    together = [target.start((0, 3)) for _ in proposals]
    alone = [target.start((0, 3)) for _ in proposals]
    for session in (*together, *alone):
        list(session.prefill(random_prompt(3, 3)))
    verified = by_proposal(proposals, *SharedVerifier(target).verify(together, proposals))
    for session, proposal, (logits, taps) in zip(alone, proposals, verified, strict=True):
        expected_logits, expected_taps = session.verify(proposal)
        assert mx.array_equal(logits, expected_logits)
        assert mx.array_equal(taps, expected_taps)
    for session in (*together, *alone):
        session.commit([0, 1])
    assert all(states_are_same(*pair) for pair in zip(together, alone, strict=True))


def test_a_second_target_of_the_same_model_does_not_disturb_a_session():
    """A target without kernels reads rows between another's verify and commit.

    Another thread might do that at any time.
    """
    target = exact_target("qwen3_5", Launches())
    stock = Target(target.model, CharacterTokenizer(), config=target.config, name="stock")
    disturbed = target.start()
    undisturbed = target.start()
    for session in (disturbed, undisturbed):
        list(session.prefill(random_prompt(3, 3)))
        session.verify(Proposal(random_prompt(7, 1)))
        if session is disturbed:
            stock.start().verify(Proposal([1, 2]))
        session.commit([0, 1, 2])
    assert states_are_same(disturbed, undisturbed)


def test_a_forward_has_at_most_as_many_rows_as_the_kernels_take():
    """Requests share a forward, in order, until the next one's rows would not fit."""
    target = family_target("qwen3")
    kernels = SimpleNamespace(attention=None, on_device=False)
    target.kernel_plan = SimpleNamespace(widest=64, exact=False, rows={}, kernels=kernels)

    def requests_per_forward(widths: list[int]) -> list[int]:
        session = target.start()
        rows = Rows([Span(session, Proposal([1] * width)) for width in widths])
        return [len(part.spans) for part in target._split_by_forward(rows, target.sharing)]

    assert requests_per_forward([40, 24, 1, 63, 2, 64]) == [2, 2, 1, 1]
    assert requests_per_forward([64]) == [1]
