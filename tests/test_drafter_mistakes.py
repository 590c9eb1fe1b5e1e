"""A drafter that is read wrongly still drafts, only badly: each such mistake changes its drafts.

The mistakes are those that other loaders have made. Each is planted in a golden drafter, whose
drafts are known to be right without it, and the drafts of all its rounds are compared.
"""

import dataclasses

import mlx.core as mx
import pytest
from golden import FOLDERS, Golden
from mlx.utils import tree_map_with_path
from test_dflash2 import build, random_weight, raw_config
from tinymodels import drafter_config, target

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dspark import network_for
from dflash_mlx.drafter.rope import make_rope
from dflash_mlx.drafter.session import NetworkSession
from dflash_mlx.sampling import Sampler


def drafts(golden):
    """What is drafted in all rounds, and what should be."""
    found, expected, known = [], [], 0
    session = NetworkSession(golden.drafter, golden.target(), Sampler())
    for number in range(golden.rounds):
        case = golden.case(number)
        session.extend(golden.context[:, known : case.start])
        known = case.start
        proposal = session.propose(case.anchor, len(case.tokens) + 1)
        found += proposal.tokens.tolist()[1:]
        expected += case.tokens.tolist()[: len(proposal) - 1]
    return found, expected


def wrong(golden):
    """How many drafts are not what they should be."""
    return sum(a != b for a, b in zip(*drafts(golden), strict=True))


def replan(golden, **fields):
    golden.drafter.config = dataclasses.replace(golden.drafter.config, **fields)


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_planted_nothing_wrong(name):
    assert wrong(Golden(name)) == 0


@pytest.mark.parametrize("name", FOLDERS)
def test_the_wrong_first_row(name):
    golden = Golden(name)
    replan(golden, first_row=1 - golden.drafter.config.first_row)
    assert wrong(golden) > 5


@pytest.mark.parametrize("name", FOLDERS)
def test_causality_the_other_way(name):
    golden = Golden(name)
    for layer in golden.drafter.layers:
        layer.self_attn.causal = not layer.self_attn.causal
    assert wrong(golden) > 0


@pytest.mark.parametrize("name", FOLDERS)
def test_the_other_rotary_pairs(name):
    golden = Golden(name)
    replan(golden, rope_neox=False)
    for layer in golden.drafter.layers:
        layer.self_attn.rope = make_rope(golden.drafter.config)
    assert wrong(golden) > 0


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("dspark")])
def test_no_markov_bias(name):
    golden = Golden(name)
    del golden.drafter["markov_head"]
    assert wrong(golden) > 10


def test_draft_ids_taken_for_the_targets():
    golden = Golden("dspark_speculators")
    golden.drafter.d2t = mx.zeros_like(golden.drafter.d2t)
    assert wrong(golden) > 10


def test_taps_in_another_order():
    for name in FOLDERS:
        golden = Golden(name)
        width = golden.drafter.config.target_hidden_size
        golden.context = mx.roll(golden.context, width, axis=-1)
        assert wrong(golden) > 2, name


TAPS = {
    "zlab": {"dflash_config": {"target_layer_ids": [0, 2]}},
    "deepspec": {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [0, 2],
        "markov_rank": 0,
        "enable_confidence_head": False,
    },
    "speculators": {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": None,
    },
}


@pytest.mark.parametrize("packaging", TAPS)
def test_taps_shifted_by_one(packaging):
    """Every packaging reads the same layers by its own ids; one layer further the drafts change."""
    raw = {k: v for k, v in drafter_config().items() if k != "target_layer_ids"} | TAPS[packaging]
    raw["draft_vocab_size"] = raw["vocab_size"]
    config = DraftConfig.from_dict(raw)
    assert config.packaging == packaging and config.target_layer_ids == (0, 2)
    mx.random.seed(3)
    drafter = network_for(config)(config)
    drafter.update(tree_map_with_path(random_weight, drafter.parameters()))
    text, found = [5, 9, 2, 40, 41, 7, 100, 23], []
    for shift in (0, -1):
        taps = tuple(layer + shift for layer in config.target_layer_ids)
        drafter.config = dataclasses.replace(config, target_layer_ids=taps)
        session = drafter.start(target())
        for _, features in target().start(drafter.tap_layers).prefill(text):
            session.extend(features)
        found.append(session.propose(3, 8).tokens.tolist())
    assert found[0] != found[1]


def test_amplitude_1_instead_of_the_pinned_one():
    """Kimi-K2.5's, at a size that can be drafted: the same YaRN, and 1.4159 or 1."""
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    config = raw_config(dflash2=False, rope_scaling=yarn)
    drafter = build(config)
    assert drafter.config.rope_amplitude == pytest.approx(1.4158883083359672)
    taps, block = mx.random.normal((1, 40, 64)), mx.random.normal((1, 6, 32))
    hidden = [drafter(block, taps, drafter.make_cache())]
    drafter.config = dataclasses.replace(drafter.config, rope_amplitude=1.0)
    for layer in drafter.layers:
        layer.self_attn.rope = make_rope(drafter.config)
    hidden.append(drafter(block, taps, drafter.make_cache()))
    assert mx.abs(hidden[0] - hidden[1]).max().item() > 0.1
    head = mx.random.normal((32, 67))
    assert not mx.array_equal(*[(states @ head).argmax(axis=-1) for states in hidden])
