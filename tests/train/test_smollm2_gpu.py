"""The parts in PyTorch of SmolLM2's recipe; `smollm2.gpu.check` compares whole answers."""

from random import Random
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from smollm2 import answers

from dflash_mlx.train.fit import MAX_NORM, make_optimizer, schedule
from dflash_mlx.train.losses import LossWeights

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the recipe alone needs it")

from smollm2.gpu import stored, writer  # noqa: E402
from smollm2.gpu.acceptance import walk  # noqa: E402
from smollm2.gpu.drafter import slot_losses  # noqa: E402
from smollm2.gpu.features import Sample, groups  # noqa: E402
from smollm2.gpu.optimizer import Optimizer, rate_share  # noqa: E402

VOCABULARY = 50


def test_matrices_are_stored_in_the_bits_of_mlx():
    weight = torch.randn((40, 128), generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0.25  # a group of one value
    weight[4, :32] = 0
    words, scales, biases = stored.packed(weight, 32)
    theirs = mx.quantize(mx.array(weight.numpy()).astype(mx.bfloat16), group_size=32, bits=4)
    assert np.array_equal(words.numpy(), np.array(theirs[0]))
    for part, expected in zip((scales, biases), theirs[1:], strict=True):
        assert np.array_equal(part.float().numpy(), np.array(expected.astype(mx.float32)))
    unpacked = stored.unpacked(words, scales, biases, 32)
    floats = [part.astype(mx.float32) for part in theirs[1:]]
    expected = mx.dequantize(theirs[0], *floats, group_size=32, bits=4)
    assert np.allclose(unpacked.numpy(), np.array(expected), atol=1e-6)


def test_a_drafter_is_read_back_as_it_was_stored(tmp_path):
    config = {"quantization": {"group_size": 32, "bits": 4}}
    weights = {
        "fc.weight": torch.randn((8, 64)),
        "norm.weight": torch.randn(64),
        "d2t": torch.arange(5),
    }
    stored.save(config, weights, tmp_path)
    read_config, read = stored.load(tmp_path)
    assert read_config == config
    rounded = stored.rounded_to_stored(weights, 32)
    assert all(torch.equal(read[name], rounded[name]) for name in weights)


def test_answers_end_where_the_recipe_ends_them():
    """At an end token, at the limit, or when they repeat themselves."""
    random = Random(1)
    rows = []
    for _ in range(60):
        period = random.randint(1, 40)
        pattern = [random.randint(2, VOCABULARY - 1) for _ in range(period)]
        body = [random.randint(1, VOCABULARY - 1) for _ in range(random.randint(0, 60))]
        rows.append((body + pattern * 200)[:200])
    starts = [random.randint(1, 30) for _ in rows]
    limits = [random.randint(1, 150) for _ in rows]
    expected = []
    for tokens, start, limit in zip(rows, starts, limits, strict=True):
        row = answers.Row(0, tokens[:start], start, False, limit)
        for token in tokens[start:]:
            row.add(token, [1])
            if row.over:
                break
        expected.append(len(row.tokens) - start)
    text = torch.tensor(rows)
    state = [torch.tensor(starts), torch.full((len(rows),), 200), torch.tensor(limits)]
    assert writer.answer_lengths(text, *state, torch.tensor([1])).tolist() == expected
    written = torch.tensor(starts) + torch.tensor(expected)
    # A row has no length until its last token is written.
    for missing, lengths in ((0, expected), (1, [0] * len(rows))):
        state[1] = written - missing
        assert writer.answer_lengths(text, *state, torch.tensor([1])).tolist() == lengths


def test_tokens_are_drawn_by_temperature_top_p_and_min_p():
    shares = torch.tensor([0.5, 0.3, 0.14, 0.04, 0.02])
    logits = torch.full((4000, VOCABULARY), -30.0)
    logits[:, 3:8] = shares.log()
    random = torch.Generator().manual_seed(2)
    noise = torch.empty((4000, writer.TOP)).exponential_(generator=random)

    def drawn(*sampling: float) -> list[float]:
        """The share of each token with this temperature, top_p and min_p."""
        settings = torch.tensor([sampling]).expand(4000, 3)
        tokens = writer.chosen(logits, settings, noise)
        return (torch.bincount(tokens, minlength=8)[3:8] / 4000).tolist()

    assert drawn(0, 1, 0) == [1, 0, 0, 0, 0]
    assert drawn(1, 1, 0) == pytest.approx(shares.tolist(), abs=0.03)
    assert drawn(1, 0.7, 0) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.03)
    assert drawn(1, 1, 0.1) == pytest.approx([0.53, 0.32, 0.15, 0, 0], abs=0.03)
    sharp = (shares**2 / (shares**2).sum()).tolist()
    assert drawn(0.5, 1, 0) == pytest.approx(sharp, abs=0.03)


class Counter:
    """A model whose next token follows from the last one and its position."""

    device = "cpu"
    stops = (0,)

    def after(self, tokens, positions):
        return (7 * tokens + 3 * positions + 1) % VOCABULARY

    def new_caches(self, rows, length):
        return [(torch.zeros(rows, 1, length, 1), torch.zeros(rows, 1, length, 1))]

    def read(self, tokens, caches):
        caches += [(tokens[:, None, :, None].float(),) * 2]
        return self.after(tokens, torch.arange(tokens.shape[1])), []

    def head(self, hidden):
        return torch.nn.functional.one_hot(hidden, VOCABULARY).float()

    def step(self, tokens, positions, caches, span):
        assert int(positions.max()) < span
        return self.head(self.after(tokens, positions))


def test_the_writer_fills_its_slots_again():
    """Three slots answer ten prompts, and further tasks that continue three of them."""
    model = Counter()
    prompts = [[5 + number] + list(range(2, 4 + 3 * number)) for number in range(10)]
    limits = [3 + 7 * number for number in range(10)]
    finished = []

    def done(task):
        finished.append(task)
        more = task.number < 3
        return writer.Task(10 + task.number, task.prompt + task.answer, 9) if more else None

    tasks = [
        writer.Task(number, *of_task)
        for number, of_task in enumerate(zip(prompts, limits, strict=True))
    ]
    too_long = writer.Task(99, [1] * 600, 9)
    count = writer.Writer(model, slots=3, length=300).write([too_long] + tasks, done)
    assert sorted(task.number for task in finished) == list(range(13))
    assert count == sum(len(task.answer) for task in finished)
    for task in finished:
        tokens = list(task.prompt)
        while len(tokens) < len(task.prompt) + task.limit:
            tokens.append(model.after(tokens[-1], len(tokens) - 1))
            if tokens[-1] == 0:
                break
        assert task.answer == tokens[len(task.prompt) :]
        assert task.ended == (tokens[-1] == 0)
    assert any(task.ended for task in finished)


def test_a_writer_that_has_no_time_left_writes_nothing():
    task = writer.Task(0, [1, 2], 5)
    assert writer.Writer(Counter(), slots=2, length=100).write([task], print, deadline=0) == 0


def test_the_walk_takes_the_steps_of_decoding():
    """A step moves by what was accepted at its place, and by one token more."""
    sample = Sample(list(range(20)), 10)  # nine tokens after the answer's first
    assert walk(sample, [0] * 9) == 9
    assert walk(sample, [7] * 9) == 2
    assert walk(sample, [2, 9, 9, 0, 1, 9, 4, 0, 0]) == 4  # anchors 0, 3, 4 and 6


def test_batches_have_every_sample_and_one_length():
    random = Random(3)
    samples = [Sample([1] * random.randint(3, 400), 2) for _ in range(50)]
    batches = groups(samples, 1000, random)
    assert {number for numbers in batches for number in numbers} == set(range(50))
    for numbers in batches:
        [length] = {writer.rounded(len(samples[number].tokens)) for number in numbers}
        assert len(numbers) == max(1, 1000 // length)


def test_the_optimizer_is_the_packages():
    random = np.random.default_rng(4)
    shapes = {"wide": (4, 12), "tall": (12, 4), "norm": (12,)}
    start = {name: random.normal(size=shape).astype("f") for name, shape in shapes.items()}
    theirs = {name: mx.array(weight) for name, weight in start.items()}
    ours = {name: torch.tensor(weight) for name, weight in start.items()}
    optimizer = Optimizer(ours)
    package = make_optimizer("muon", 0.02, 6)
    package.init(theirs)
    rate = schedule(0.02, 6)
    for step in range(6):
        gradients = {name: random.normal(size=shape).astype("f") for name, shape in shapes.items()}
        optimizer.update(
            {name: torch.tensor(gradient) for name, gradient in gradients.items()},
            float(rate(mx.array(step))),
        )
        arrays = {name: mx.array(gradient) for name, gradient in gradients.items()}
        clipped, _ = optim.clip_grad_norm(arrays, MAX_NORM)
        theirs = package.apply_gradients(clipped, theirs)
    for name, weight in ours.items():
        assert np.allclose(weight.numpy(), np.array(theirs[name]), atol=1e-5), name


def test_the_rate_rises_and_falls_like_the_packages():
    rate = schedule(1.0, 1000)
    for step in (0, 20, 40, 100, 500, 1000):
        close = 1e-3 if step >= 40 else 0.03  # ours begins at 0
        assert rate_share(step / 1000) == pytest.approx(float(rate(mx.array(step))), abs=close)


def test_the_loss_is_the_packages():
    random = np.random.default_rng(5)
    ids = np.sort(random.choice(VOCABULARY, 20, replace=False))
    logits = random.normal(size=(30, 20)).astype("f")
    choices = random.integers(0, VOCABULARY, 30)
    tops = np.stack([random.choice(VOCABULARY, 6, replace=False) for _ in range(30)])
    shares = random.uniform(0, 0.15, (30, 6)).astype("f")
    numbers = SimpleNamespace(ids=ids, choices=choices, tops=tops, shares=shares)
    ours, can_draft = slot_losses(
        torch.tensor(logits), **{k: torch.tensor(v) for k, v in vars(numbers).items()}
    )
    places = np.full(VOCABULARY, -1)
    places[ids] = np.arange(20)
    labels = places[choices]
    kept = np.where(places[tops] >= 0, shares, 0)
    package = LossWeights(cross_entropy=0.5, kl=0.5).of(
        mx.array(logits),
        labels=mx.array(np.maximum(labels, 0)),
        tops=mx.array(np.maximum(places[tops], 0)),
        shares=mx.array(kept),
    )
    assert np.array_equal(can_draft.numpy(), labels >= 0)
    right = labels >= 0
    assert np.allclose(ours.numpy()[right], np.array(package)[right], atol=1e-5)
    cross = nn.losses.cross_entropy(mx.array(logits), mx.array(np.maximum(labels, 0)))
    assert not np.allclose(ours.numpy()[right], np.array(cross)[right])  # half of it is the KL
