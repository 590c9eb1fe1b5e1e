"""What many requests in one forward share, counted; and models that cannot share as much."""

from threading import Lock

import mlx.core as mx
import pytest
from batches import BatchAndSingles, memory, tiny_target
from families import FAMILIES, Letters, random_prompt
from mlx_lm.utils import _get_classes
from test_batched import ONE_BY_ONE

from dflash_mlx.errors import UnsupportedTreeError
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target
from dflash_mlx.targets.batched import BatchVerifier
from dflash_mlx.targets.overrides import Overrides

INDEXERS = ("glm_moe_dsa", "deepseek_v32")  # called for each request
WEIGHTS = ("Linear", "SwitchLinear", "MultiLinear", "Conv1d", "Embedding")
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}


def readings(target: Target, count: int) -> tuple[int, int]:
    """How often a round of so many requests runs the model, and a module with weights."""
    sessions, calls = [target.start() for _ in range(count)], []
    watching = Overrides(Lock())
    for module in target.model.modules():
        if module is target.model or type(module).__name__ in WEIGHTS:
            watching.watch(module, lambda *_, module=module: calls.append(module))
    verifier = BatchVerifier(target)
    proposals = [Proposal(random_prompt(1 + at % 3, at)) for at in range(count)]
    with watching.installed():
        verifier.verify(sessions, proposals)
    models = sum(call is target.model for call in calls)
    return models, len(calls) - models


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_once_for_all(family):
    target = tiny_target(family)
    two, eight = (readings(target, count) for count in (2, 8))
    if family in ONE_BY_ONE:
        assert (two[0], eight[0]) == (2, 8)
        return
    assert two[0] == eight[0] == 1, "one forward"
    if family in INDEXERS:
        assert two[1] < eight[1] < 4 * two[1], "the control: not all is shared"
    else:
        assert two[1] == eight[1]


def test_nothing_is_evaluated():
    target = tiny_target("qwen3_5")
    sessions = [target.start((0, 3)) for _ in range(8)]
    for session in sessions:
        list(session.prefill(random_prompt(9, 1)))
    verifier = BatchVerifier(target)
    before = memory()
    verified = verifier.verify(sessions, [Proposal(random_prompt(8, 2))] * 8)
    assert memory() - before < 8192
    mx.eval(verified)
    assert memory() - before > 65536  # the control: logits of 64 rows


def test_a_request_that_cannot_be_verified_leaves_the_others_as_they_were():
    target = tiny_target("qwen3")
    sessions = [target.start(), target.start()]
    target.why_no_trees = "something"
    with pytest.raises(UnsupportedTreeError):
        BatchVerifier(target).verify(sessions, [Proposal([1, 2]), Proposal([1, 2, 3], (-1, 0, 0))])
    assert all(session.intact for session in sessions)


def test_nobodys_caches_are_held_on_to():
    """A request that ends is forgotten, although the verifier goes on."""
    target = tiny_target("glm_moe_dsa")
    verifier = BatchVerifier(target)
    sessions = [target.start(), target.start()]
    verifier.verify(sessions, [Proposal([1, 2]), Proposal([3])])
    assert not target.reading


@pytest.mark.parametrize(
    ("kind", "shares", "fields"),
    [
        # Attention of its own making.
        (
            "gemma2",
            False,
            {
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 16.0,
            },
        ),
        # Queries that grow with the position, which the model works out for all layers at once.
        (
            "ministral3",
            False,
            {
                "rope_parameters": {
                    "rope_theta": 10000.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 16,
                },
                "layer_types": ["full_attention"] * 3,
            },
        ),
        # Layers without positions.
        ("smollm3", True, {"no_rope_layer_interval": 2}),
    ],
)
def test_models_that_share_less(kind, shares, fields):
    """Found out while a forward is built, not by name; every request is as alone all the same."""
    config = SHAPE | {"model_type": kind} | fields
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    pair = BatchAndSingles(Target(model, Letters(), config, kind), 3)
    assert pair.verifier.shares_forwards is shares
    for _ in range(2):
        pair.round(range(3))
    pair.check_states()
