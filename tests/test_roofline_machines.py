"""The predicted rounds of machines that share a target, against sums by hand and counted ones."""

import json
from collections import Counter
from dataclasses import replace

import families
import mlx.core as mx
import pytest
import tinymodels
from typer.testing import CliRunner

from dflash_mlx.bench.machines import (
    MESSAGE_BYTES,
    Exchange,
    Shard,
    drafter_matrices,
    fastest,
    shard_of,
    shared_rounds,
)
from dflash_mlx.bench.roofline import Shapes, model_of, rounds
from dflash_mlx.cli.app import app
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import SettingsError
from dflash_mlx.kernels.shapes import Matrix
from dflash_mlx.machine.chips import Chip
from dflash_mlx.machine.links import JACCL, RING, Link, link_named, links

CHIP = Chip("made up", "M4", bandwidth=100e9 / 0.85, flops=1e30, stock_share=1.0)  # reads 100 GB/s
MEGABYTE = Matrix(500, 1000, 10**6, "float", 16)  # 10 us of it
RING_LINK = Link("ring", "", RING, step=100e-6, bandwidth=1e9, source="")


def test_a_sum_by_hand():
    """Of 8,000 bytes: a ring of 4 takes 6 steps of 2,000 bytes; a mesh one of all of them."""
    mesh = replace(RING_LINK, backend=JACCL)
    assert RING_LINK.summing(8000, 4) == pytest.approx(6 * (100e-6 + 2e-6))
    assert RING_LINK.summing(8000, 2) == pytest.approx(2 * (100e-6 + 4e-6))
    assert RING_LINK.gathering(8000, 4) == pytest.approx(3 * (100e-6 + 2e-6))
    assert mesh.summing(8000, 4) == pytest.approx(100e-6 + 8e-6)
    assert mesh.gathering(8000, 4) == pytest.approx(100e-6 + 2e-6)
    assert RING_LINK.summing(8000, 1) == mesh.summing(8000, 1) == 0


def test_a_round_by_hand():
    """Two machines, 1 MB of matrix and 0.5 MB of other weights each, 4 sums a forward."""
    shard = Shard(2, Shapes([MEGABYTE], 500_000, 0), Counter({Exchange(1000, 2): 4}), [])
    found = shared_rounds(shard, [MEGABYTE, MEGABYTE], CHIP, RING_LINK, acceptance=8)
    plain, whole = found[0], found[15]
    message = 2 * (100 + MESSAGE_BYTES / 2 / 1000)  # in us, at 1,000 bytes each
    assert plain.compute_ms == whole.compute_ms == pytest.approx(0.015)
    assert plain.link_ms == pytest.approx((4 * 2 * (100 + 1) + message) / 1000)
    assert whole.link_ms == pytest.approx((4 * 2 * (100 + 16) + message) / 1000)
    assert (plain.draft_ms, whole.draft_ms) == (0, pytest.approx(0.02))
    before = plain.compute_ms + plain.link_ms
    after = whole.compute_ms + whole.link_ms + whole.draft_ms
    assert (plain.speedup, whole.speedup) == (1, pytest.approx(8 * before / after))
    assert whole.tokens_per_second == pytest.approx(8 / after * 1000)
    assert fastest(found) is whole


def test_drafting_gains_more_as_latency_grows():
    """Up to the tokens of a round: then a forward is nothing but waiting."""
    shard = Shard(2, Shapes([MEGABYTE] * 20, 0, 0), Counter({Exchange(1000, 2): 40}), [])
    gains = [
        shared_rounds(shard, [MEGABYTE] * 20, CHIP, replace(RING_LINK, step=step), 8)[15].speedup
        for step in (0, 1e-6, 1e-5, 1e-4, 1e-3, 1)
    ]
    assert gains == sorted(gains) and len(set(gains)) == len(gains)
    assert gains[0] < 5 and gains[-1] == pytest.approx(8, rel=1e-3)


def test_one_machine_is_the_roofline_without_its_tiles():
    config = families.CONFIGS["qwen3"]
    model = model_of(config, families.Path("config.json"), None)
    shard = shard_of(model, config, 100, 1, "qwen3")
    shared = shared_rounds(shard, [], CHIP, RING_LINK, 6)
    alone = rounds(shard.shapes, CHIP, 6)
    assert [one.speedup for one in shared] == pytest.approx([one.stock_speedup for one in alone])
    assert all(one.link_ms == 0 for one in shared)


def counted(family: str, monkeypatch) -> Counter:
    """What a forward of the family's tiny model really does with others, by its width.

    mlx-lm shards it for a group of one, where sums are called and do nothing.
    """
    found: Counter = Counter()
    for name in ("all_sum", "all_gather"):
        own = getattr(mx.distributed, name)

        def noted(x, *of, name=name, own=own, **settings):
            found[name, x.shape[-1]] += 1
            return own(x, *of, **settings)

        monkeypatch.setattr(mx.distributed, name, noted)
    model = families.random_model(family)
    model.shard(mx.distributed.init())
    mx.disable_compile()  # a compiled function sums, too, and is called once
    try:
        mx.eval(model(mx.array([[1, 2, 3]])))
    finally:
        mx.enable_compile()
    return found


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_5_moe", "gpt_oss", "minimax_m2", "glm4_moe", "deepseek_v41"]
)
def test_sums_are_those_that_a_forward_makes(family, monkeypatch):
    config = families.CONFIGS[family]
    model = model_of(config, families.Path("config.json"), None)
    shard = shard_of(model, config, 0, 2, family)
    ours = {
        ("all_gather" if one.gathers else "all_sum", one.width): count
        for one, count in shard.exchanges.items()
    }
    assert ours == counted(family, monkeypatch)
    hidden = (config.get("text_config") or config)["hidden_size"]
    assert ours["all_sum", hidden] == 2 * len(model.layers)


@pytest.mark.parametrize("machines", [2, 4])
def test_a_machine_reads_its_part(machines):
    """Of llama, whose head is its embedding: all matrices in parts, norms and the head whole."""
    config = tinymodels.model_config("llama") | {"num_key_value_heads": 4}
    sizes = [
        shard_of(model_of(config, families.Path("x"), None), config, context, count, "llama")
        for count, context in ((1, 0), (machines, 0), (1, 100), (machines, 100))
    ]
    whole, part, _, _ = sizes
    head = 2 * config["vocab_size"] * config["hidden_size"]
    assert [matrix.size for matrix in whole.head] == [head]
    layers = sum(matrix.size for matrix in whole.shapes.matrices) - head
    assert sum(matrix.size for matrix in part.shapes.matrices) == layers // machines + head
    assert part.shapes.other == whole.shapes.other
    assert sizes[3].shapes.context * machines == sizes[2].shapes.context > 0


def test_rank_0_has_the_whole_head():
    """Where mlx-lm slices it, a forward reads a slice and a draft all of it."""
    config = families.CONFIGS["qwen3_5"]
    shard = shard_of(model_of(config, families.Path("x"), None), config, 0, 2, "qwen3_5")
    [head] = shard.head
    slices = [one.columns for one in shard.shapes.matrices if one.columns == head.columns // 2]
    assert slices and all(one.columns != head.columns for one in shard.shapes.matrices)


def test_the_drafter_borrows_the_head():
    folder = families.Path(families.__file__).parents[1] / "dflash_mlx" / "tiny" / "drafter"
    config = DraftConfig.from_file(folder / "config.json")
    head = Matrix(config.vocab_size, config.hidden_size, 1, "float", 16)
    found = drafter_matrices(config, [head])
    taps = len(config.target_layer_ids) * config.target_hidden_size
    assert found[-1] is head and [one.depth for one in found].count(taps) == 1
    assert len(found) == 7 * config.num_hidden_layers + 2


def roofline(*arguments, columns=100):
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(app, ["roofline", "--chip", "M4Max", *map(str, arguments)])


def test_the_command():
    done = roofline("--machines", "2", "--link", "10gbe", "--json")
    content = json.loads(done.stdout)
    assert content["prediction"] is True and content["machines"] == 2
    assert content["link"]["name"] == "10gbe" and content["drafter"] == "tiny"
    assert [row["rows"] for row in content["rounds"]] == list(range(1, 17))
    gains = {one["link"]: one["speedup"] for one in content["links"]}
    assert list(gains) == ["one machine", *(link.name for link in links())]
    assert gains["one machine"] < gains["thunderbolt5"] < gains["10gbe"] < content["acceptance"]
    row = content["rounds"][content["recommended_rows"] - 1]
    assert row["speedup"] == pytest.approx(gains["10gbe"])


@pytest.mark.parametrize("columns", [40, 100])
def test_no_figure_is_cut_off(columns):
    done = roofline("--machines", "2", columns=columns)
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 16 + 1 + 1 + len(links()) and "…" not in done.stdout
    assert max(map(len, lines)) <= columns
    assert "prediction, not a measurement" in done.stderr and "The link: 35 us" in done.stderr


def test_every_link_names_its_source():
    assert all(link.source and link.step > 0 and link.bandwidth > 0 for link in links())
    with pytest.raises(SettingsError, match="thunderbolt5, "):
        link_named("string")


def test_what_the_command_cannot_use_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(families.CONFIGS["gemma4_dense"]))
    more = ["--model", tmp_path, "--acceptance", "4"]
    for arguments, code, said in [
        (["--link", "10gbe"], 2, "--machines"),
        (["--machines", "2", "--link", "string"], 2, "No link"),
        (["--machines", "4"], 2, "2 heads"),
        (["--machines", "2", *more], 2, "use one"),
        (["--machines", "2", "--draft", tmp_path / "none"], 1, "none"),
    ]:
        done = roofline(*arguments)
        assert done.exit_code == code and said in done.stderr, (arguments, done.stderr)
        assert arguments[0] == "--link" or (
            done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        )
