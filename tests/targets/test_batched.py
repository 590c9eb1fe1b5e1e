"""Many requests in one forward: each gets the results and the caches of a forward of it alone."""

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

# Latents and Mamba's states have another arithmetic in a prefill; Nanbeige's last norm runs twice.
READ_ALONE = (
    *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "nemotron_h", "nanbeige"),
    "deepseek_v41",
)
ONE_BY_ONE = ("deepseek_v41",)  # a forward for each request


@pytest.mark.parametrize("family", FAMILIES)
def test_every_request_gets_what_it_gets_alone(family):
    """Steps of three, eight, one and eight requests, chains and trees; some rows are kept."""
    pair = BatchAndSingles(family_target(family), 8)
    assert (pair.target.sharing is not None) is (family not in ONE_BY_ONE)
    for members, trees in (((6, 1, 3), False), (range(8), True), ((5,), True), (range(8), False)):
        pair.step(members, trees)
    pair.check_states()


@pytest.mark.parametrize("family", FAMILIES)
def test_ends_of_prompts_give_the_same_read_together_or_alone(family):
    """With or without earlier rows in the caches, which must be right for the next step."""
    pair = BatchAndSingles(family_target(family), 4)
    sharing = pair.target.sharing
    assert (sharing is not None and sharing.reads_prompts) is (family not in READ_ALONE)
    if family in READ_ALONE:
        return
    layers = 0, pair.target.num_layers - 1
    for index in (0, 2, 3):
        pair.together[index], pair.alone[index] = (pair.target.start(layers) for _ in range(2))
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
def test_quantized_keys_beside_others(family):
    """The keys of every second request are quantized."""
    pair = BatchAndSingles(family_target(family), 3, kv_bits=8)
    for trees in (False, True):
        pair.step(range(3), trees)
    for _ in range(4):  # of as many rows each, now and then
        pair.step(range(2))
    pair.check_states()


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 16, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_requests_of_every_family(family, count):
    """Logits and features bit for bit; with `--stock-blas` on MLX's own BLAS."""
    pair = BatchAndSingles(family_target(family), count)
    for trees in (False, True):
        pair.step(range(count), trees)
    pair.check_states()


@pytest.mark.parametrize("family", ["qwen3", "gemma4_E4B-like", "qwen3_next", "deepseek_v41"])
def test_going_back_does_not_depend_on_other_requests(family):
    """Rewinding, trimming and the steps after them give the same in a batch as alone."""
    pair = BatchAndSingles(family_target(family), 2)
    marks = [
        [member.checkpoint() for member in pair.together],
        [member.checkpoint() for member in pair.alone],
    ]
    for _ in range(2):
        pair.step(range(2))
    for sessions, each in zip((pair.together, pair.alone), marks, strict=True):
        for session, mark in zip(sessions, each, strict=True):
            session.rewind(mark)
    pair.step(range(2))
    if pair.together[0].can_trim:
        for session in (*pair.together, *pair.alone):
            session.trim_to(1)
        pair.step(range(2))
    pair.check_states()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_requests_come_go_and_outgrow_their_slots(family, monkeypatch):
    """Slots of eight rows and more; a request's rows do not depend on the other requests."""
    monkeypatch.setattr(kv_slots, "STEP", 8)
    assert [kv_slots.capacity_for(rows) for rows in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 32]
    pair = BatchAndSingles(family_target(family), 8)
    for members in (range(8), (5, 0, 3), (1, 0, 5, 6, 2, 7), (3, 2), range(8)):
        pair.step(members)
        arrays = {pair.together[member].slot.array for member in members}
        assert sum(len(array.sessions) for array in arrays) == len(members)
    assert len(arrays) > 1 and max(array.capacity for array in arrays) >= 64
    pair.check_states()
    assert not any(array.sessions or array.layers for array in arrays), "all have left"


def test_masks_of_slots_count_positions():
    """One request has two rows after 3 tokens; the other has one after 5, repeated as padding."""
    slots = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    spans = [
        Span(SimpleNamespace(position=3, slot=slots[0]), Proposal([1, 2])),
        Span(SimpleNamespace(position=5, slot=slots[1]), Proposal([1])),
    ]
    rows = kv_slots.SlotRows(kv_slots.SlotArray(8), spans, stacked=False)
    for window in (None, 2, 3):
        seen = [
            [position - (window or 9) < key <= position for key in range(6)]
            for position in (3, 4, 5, 5)
        ]
        assert rows.mask(window).reshape(4, 6).tolist() == seen


def test_layers_share_what_their_attention_looks_up(monkeypatch):
    """It is looked up once for each of twelve requests, not again in every layer."""
    target = family_target("qwen3")
    asked = []
    target.kernel_plan = KernelPlan(Kernels(lambda **_: None), {}, exact=False, layers=frozenset())
    monkeypatch.setattr(
        attention, "attention_rows", lambda *arguments: asked.append(arguments) or ()
    )
    verifier = SharedVerifier(target)
    sessions = [target.start((), 8) for _ in range(12)]
    for length, session in enumerate(sessions, start=1):
        list(session.prefill(random_prompt(length, length)))
    asked.clear()
    verifier.verify(sessions, [Proposal([1, 2])] * 12)
    assert len(asked) == 12


def test_tokens_outside_the_vocabulary_are_replaced_with_its_last():
    session = SimpleNamespace(position=0, slot=None)
    proposals = [Proposal([3, 256]), Proposal(mx.array([300], mx.int32))]
    rows = Rows([Span(session, proposal) for proposal in proposals])
    assert rows.tokens(256).tolist() == [3, 255, 255]
    assert Rows(rows.spans[:1]).tokens(256).tolist() == [3, 255]


INDEXERS = ("glm_moe_dsa", "deepseek_v32")  # called for each request
WEIGHTS = ("Linear", "SwitchLinear", "MultiLinear", "Conv1d", "Embedding")


def calls_of_a_step(target: Target, count: int) -> tuple[int, int]:
    """How often a step of `count` requests calls the model, and modules with weights."""
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
    models = sum(call is target.model for call in calls)
    return models, len(calls) - models


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_once_for_all(family):
    target = family_target(family)
    two, eight = (calls_of_a_step(target, count) for count in (2, 8))
    if family in ONE_BY_ONE:
        assert (two[0], eight[0]) == (2, 8)
        return
    assert two[0] == eight[0] == 1, "one forward"
    if family in INDEXERS:
        assert two[1] < eight[1] < 4 * two[1], "the control: not all is shared"
    else:
        assert two[1] == eight[1]


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
        ("gemma2", False),  # its own attention
        ("ministral3", False),  # queries that grow with the position, worked out for all layers
        ("smollm3", True),  # layers without positions
    ],
)
def test_models_that_share_less(name, shares):
    """The target learns this by building a forward. Requests still get what they get alone."""
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
def test_logits_of_last_rows_are_those_of_all_rows(family, widths, in_slots):
    """Requests with slots and equal widths are stacked on the batch axis, others are not."""
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
    assert same(results[1], results[0][mx.array([widths[0] - 1, sum(widths) - 1])])
