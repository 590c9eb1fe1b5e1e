"""Requests that share a forward get the logits, features and caches that they get alone."""

import gc
import weakref
from types import SimpleNamespace

import mlx.core as mx
import pytest
from batches import BatchAndSingles, SharedVerifier, same
from families import (
    FAMILIES,
    QUANTIZABLE,
    CharacterTokenizer,
    family_target,
    model_of,
    random_prompt,
)
from test_every_model import MODELS

from dflash_mlx.errors import UnsupportedTreeError
from dflash_mlx.kernels.modules import KernelPlan, Kernels
from dflash_mlx.proposal import Proposal
from dflash_mlx.subclassing import overridden
from dflash_mlx.targets import Target, attention, kv_slots
from dflash_mlx.targets.rows import Rows
from dflash_mlx.targets.span import Span

pytestmark = pytest.mark.by_family

# Families whose prompts are read one request at a time: a prefill of MLA latents or Mamba states
# rounds differently from a verification, and Nanbeige runs its last norm twice.
READ_ALONE = (
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "kimi_k25",
    "nemotron_h",
    "nanbeige",
    "deepseek_v41",
)
ONE_BY_ONE = ("deepseek_v41",)  # families that get one forward per request


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_each_request_the_results_of_verifying_it_alone(family):
    """Over steps with three, eight, one and eight requests, chains and trees."""
    pair = BatchAndSingles(family_target(family), 8)
    assert (pair.target.sharing is not None) is (family not in ONE_BY_ONE)
    pair.step([6, 1, 3])
    pair.step(range(8), trees=True)
    pair.step([5], trees=True)
    pair.step(range(8))
    pair.check_states()


@pytest.mark.parametrize("family", FAMILIES)
def test_last_chunks_of_prompts_give_the_same_results_read_together_or_alone(family):
    """Three sessions start empty and one has rows; the step afterwards must be right as well."""
    pair = BatchAndSingles(family_target(family), 4)
    sharing = pair.target.sharing
    assert (sharing is not None and sharing.reads_prompts) is (family not in READ_ALONE)
    if family in READ_ALONE:
        return
    layers = (0, pair.target.num_layers - 1)
    for index in (0, 2, 3):
        pair.together[index] = pair.target.start(layers)
        pair.alone[index] = pair.target.start(layers)
    pair.step([1])
    ends = [
        Span(session, Proposal(random_prompt(size, 7 + size)), ends_prompt=True)
        for session, size in zip(pair.together, (9, 20, 1, 64), strict=True)
    ]
    results = pair.target.read(ends)
    for end, result, session in zip(ends, results, pair.alone, strict=True):
        alone = session.read(end.proposal.tokens, last=True)
        for together, expected in zip(result, alone, strict=True):
            assert same(together, expected)
    pair.step(range(4), trees=True)
    pair.check_states()


@pytest.mark.parametrize("family", QUANTIZABLE)
def test_requests_with_and_without_quantized_keys_share_a_batch(family):
    """Every second request has 8-bit keys; each gets the results of verifying it alone."""
    pair = BatchAndSingles(family_target(family), 3, kv_bits=8)
    pair.step(range(3))
    pair.step(range(3), trees=True)
    for _ in range(4):  # some of these random steps have equally many rows in both requests
        pair.step(range(2))
    pair.check_states()


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 16, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_requests_of_every_family(family, count):
    """A batch of up to 32 requests gives each the logits and features of verifying it alone.

    With `--stock-blas` this runs on MLX's own BLAS.
    """
    pair = BatchAndSingles(family_target(family), count)
    pair.step(range(count))
    pair.step(range(count), trees=True)
    pair.check_states()


@pytest.mark.parametrize("family", ["qwen3", "gemma4_E4B-like", "qwen3_next", "deepseek_v41"])
def test_going_back_does_not_depend_on_other_requests(family):
    """Steps after a rewind or a trim give the same in a batch as alone."""
    pair = BatchAndSingles(family_target(family), 2)
    sessions = [*pair.together, *pair.alone]
    checkpoints = [session.checkpoint() for session in sessions]
    for _ in range(2):
        pair.step(range(2))
    for session, checkpoint in zip(sessions, checkpoints, strict=True):
        session.rewind(checkpoint)
    pair.step(range(2))
    if pair.together[0].can_trim:
        for session in sessions:
            session.trim_to(1)
        pair.step(range(2))
    pair.check_states()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_requests_come_go_and_outgrow_their_slots(family, monkeypatch):
    """Requests that join, leave or move to larger slots get the results they get alone."""
    monkeypatch.setattr(kv_slots, "STEP", 8)  # the smallest slot has eight rows
    assert [kv_slots.capacity_for(rows) for rows in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 32]
    pair = BatchAndSingles(family_target(family), 8)
    for members in (range(8), (5, 0, 3), (1, 0, 5, 6, 2, 7), (3, 2), range(8)):
        pair.step(members)
        arrays = {pair.together[member].slot.array for member in members}
        assert sum(len(array.sessions) for array in arrays) == len(members)
    assert len(arrays) > 1 and max(array.capacity for array in arrays) >= 64
    pair.check_states()
    assert not any(array.sessions or array.layers for array in arrays), "a slot is still in use"


def test_slot_masks_show_each_row_the_keys_up_to_its_position():
    """With or without a window, for two requests of different lengths.

    One request has two rows after 3 tokens. The other has one row after 5 tokens; that row is
    repeated as padding.
    """
    slots = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    spans = [
        Span(SimpleNamespace(position=3, slot=slots[0]), Proposal([1, 2])),
        Span(SimpleNamespace(position=5, slot=slots[1]), Proposal([1])),
    ]
    rows = kv_slots.SlotRows(kv_slots.SlotArray(8), spans, stacked=False)
    for window in (None, 2, 3):
        expected = []
        for position in (3, 4, 5, 5):
            oldest = 0 if window is None else position - window + 1
            expected.append([oldest <= key <= position for key in range(6)])
        assert rows.mask(window).reshape(4, 6).tolist() == expected


def test_the_row_counts_of_an_attention_kernel_are_looked_up_once_per_request(monkeypatch):
    """Twelve requests make twelve lookups in a forward: layers share a lookup's result."""
    target = family_target("qwen3")
    lookups = []
    target.kernel_plan = KernelPlan(Kernels(lambda **_: None), {}, exact=False, layers=frozenset())

    def attention_rows(*arguments):
        lookups.append(arguments)
        return ()

    monkeypatch.setattr(attention, "attention_rows", attention_rows)
    verifier = SharedVerifier(target)
    sessions = [target.start((), 8) for _ in range(12)]
    for length, session in enumerate(sessions, start=1):
        list(session.prefill(random_prompt(length, length)))
    lookups.clear()
    verifier.verify(sessions, [Proposal([1, 2])] * 12)
    assert len(lookups) == 12


def test_tokens_outside_the_vocabulary_are_replaced_by_its_last_token():
    session = SimpleNamespace(position=0, slot=None)
    proposals = [Proposal([3, 256]), Proposal(mx.array([300], mx.int32))]
    rows = Rows([Span(session, proposal) for proposal in proposals])
    assert rows.tokens(256).tolist() == [3, 255, 255]
    assert Rows(rows.spans[:1]).tokens(256).tolist() == [3, 255]


INDEXERS = ("glm_moe_dsa", "deepseek_v32")  # families whose indexer runs once per request
WEIGHTS = ("Linear", "SwitchLinear", "MultiLinear", "Conv1d", "Embedding")


def calls_of_a_step(target: Target, count: int) -> tuple[int, int]:
    """How often a step of `count` requests calls the model, and how often modules with weights."""
    sessions = [target.start() for _ in range(count)]
    calls = []

    def watched(call_original):
        def call(module, *args, **settings):
            calls.append(module)
            return call_original(module, *args, **settings)

        return call

    watching = [
        (module, watched)
        for module in target.model.modules()
        if module is target.model or type(module).__name__ in WEIGHTS
    ]
    verifier = SharedVerifier(target)
    proposals = [Proposal(random_prompt(1 + index % 3, index)) for index in range(count)]
    with overridden(watching):
        verifier.verify(sessions, proposals)
    of_model = sum(module is target.model for module in calls)
    return of_model, len(calls) - of_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_reads_each_weight_once(family):
    """Eight requests call the modules with weights as often as two requests do."""
    target = family_target(family)
    model_calls_of_two, weight_calls_of_two = calls_of_a_step(target, 2)
    model_calls_of_eight, weight_calls_of_eight = calls_of_a_step(target, 8)
    if family in ONE_BY_ONE:
        assert (model_calls_of_two, model_calls_of_eight) == (2, 8)
        return
    assert model_calls_of_two == model_calls_of_eight == 1, "one forward"
    if family in INDEXERS:
        assert weight_calls_of_two < weight_calls_of_eight < 4 * weight_calls_of_two
    else:
        assert weight_calls_of_two == weight_calls_of_eight


def test_a_request_that_cannot_be_verified_leaves_the_others_as_they_were():
    target = family_target("qwen3")
    sessions = [target.start(), target.start()]
    target.why_no_trees = "something"
    with pytest.raises(UnsupportedTreeError):
        SharedVerifier(target).verify(sessions, [Proposal([1, 2]), Proposal([1, 2, 3], (-1, 0, 0))])
    assert all(session.intact for session in sessions)


def test_the_caches_of_a_request_that_ended_are_freed():
    """The target and the verifier keep no reference to the sessions of a request that has ended."""
    target = family_target("glm_moe_dsa")
    verifier = SharedVerifier(target)
    sessions = [target.start(), target.start()]
    verifier.verify(sessions, [Proposal([1, 2]), Proposal([3])])
    held = [weakref.ref(session) for session in sessions]
    del sessions
    gc.collect()
    assert [session() for session in held] == [None, None]


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("gemma2", False),  # does not call mlx-lm's shared attention function
        ("ministral3", False),  # scales its queries by position, once for all layers
        ("smollm3", True),  # some layers use no positions
    ],
)
def test_a_target_tells_whether_its_model_can_share_forwards(name, shares):
    """The target learns it by building a forward; requests get the right results either way."""
    pair = BatchAndSingles(
        Target(model_of(MODELS[name], 0, 0), CharacterTokenizer(), MODELS[name], name), 3
    )
    assert (pair.target.sharing is not None) is shares
    for _ in range(2):
        pair.step(range(3))
    pair.check_states()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "nanbeige"])  # nanbeige's norm runs twice
@pytest.mark.parametrize("widths", [(3, 3), (3, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("in_slots", [True, False])
def test_a_forward_for_last_rows_gives_the_logits_that_all_rows_would(family, widths, in_slots):
    """Whether requests are stacked on the batch axis (in slots, equal widths) or not."""
    target = family_target(family)
    results = []
    for which in ("all", "last"):
        slots = kv_slots.KVSlots(target.sharing.slot_layers) if in_slots else None
        sessions = [target.start() for _ in widths]
        for number, session in enumerate(sessions):
            list(session.prefill(random_prompt(5 + number, number)))
        spans = [
            Span(session, Proposal(random_prompt(width, width)))
            for session, width in zip(sessions, widths, strict=True)
        ]
        results.append(target.forward(Rows(spans, slots=slots), which)[0])
    all_logits, last_logits = results
    last_rows = mx.array([widths[0] - 1, sum(widths) - 1])
    assert same(last_logits, all_logits[last_rows])
