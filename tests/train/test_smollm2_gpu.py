"""The PyTorch parts of SmolLM2's recipe. `smollm2.gpu.check` compares whole answers on a GPU."""

from random import Random

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


def test_matrices_are_quantized_to_the_bits_of_mlx():
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
    # A top_p of 0.7 keeps two tokens, and a min_p of 0.1 three.
    assert drawn(1, 0.7, 0) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.03)
    assert drawn(1, 1, 0.1) == pytest.approx([0.53, 0.32, 0.15, 0, 0], abs=0.03)
    sharp = (shares**2 / (shares**2).sum()).tolist()
    assert drawn(0.5, 1, 0) == pytest.approx(sharp, abs=0.03)


class ArithmeticModel:
    """A model whose next token is computed from the last one and its position."""

    device = "cpu"
    stops = (0,)

    def next_token(self, tokens, positions):
        return (7 * tokens + 3 * positions + 1) % VOCABULARY

    def new_caches(self, rows, length):
        return [(torch.zeros(rows, 1, length, 1), torch.zeros(rows, 1, length, 1))]

    def read(self, tokens, caches):
        keys = tokens[:, None, :, None].float()
        caches.append((keys, keys))
        return self.next_token(tokens, torch.arange(tokens.shape[1])), []

    def head(self, hidden):
        return torch.nn.functional.one_hot(hidden, VOCABULARY).float()

    def step(self, tokens, positions, caches, span):
        assert int(positions.max()) < span
        return self.head(self.next_token(tokens, positions))


def test_the_writer_reuses_its_slots_for_waiting_prompts():
    """Three slots answer ten prompts, and three tasks that `done` returns as continuations."""
    model = ArithmeticModel()
    prompts = [[5 + number] + list(range(2, 4 + 3 * number)) for number in range(10)]
    limits = [3 + 7 * number for number in range(10)]
    finished = []

    def done(task):
        finished.append(task)
        if task.number < 3:
            return writer.Task(10 + task.number, task.prompt + task.answer, 9)
        return None

    tasks = [writer.Task(number, prompts[number], limits[number]) for number in range(10)]
    too_long = writer.Task(99, [1] * 600, 9)
    count = writer.Writer(model, slots=3, length=300).write([too_long] + tasks, done)
    assert sorted(task.number for task in finished) == list(range(13))
    assert count == sum(len(task.answer) for task in finished)
    for task in finished:
        tokens = list(task.prompt)
        while len(tokens) < len(task.prompt) + task.limit:
            tokens.append(model.next_token(tokens[-1], len(tokens) - 1))
            if tokens[-1] == 0:
                break
        assert task.answer == tokens[len(task.prompt) :]
        assert task.ended == (tokens[-1] == 0)
    assert any(task.ended for task in finished)


def test_a_writer_that_has_no_time_left_writes_nothing():
    task = writer.Task(0, [1, 2], 5)
    assert (
        writer.Writer(ArithmeticModel(), slots=2, length=100).write([task], print, deadline=0) == 0
    )


def test_walk_counts_the_steps_of_decoding():
    """Given how many drafted tokens would be accepted at each token; a step adds one token."""
    sample = Sample(list(range(20)), 10)  # nine tokens follow the answer's first one
    assert walk(sample, [0] * 9) == 9
    assert walk(sample, [7] * 9) == 2
    assert walk(sample, [2, 9, 9, 0, 1, 9, 4, 0, 0]) == 4  # steps at tokens 0, 3, 4 and 6


def test_batches_contain_every_sample_and_each_has_one_length():
    random = Random(3)
    samples = [Sample([1] * random.randint(3, 400), 2) for _ in range(50)]
    batches = groups(samples, 1000, random)
    assert {number for numbers in batches for number in numbers} == set(range(50))
    for numbers in batches:
        [length] = {writer.rounded(len(samples[number].tokens)) for number in numbers}
        assert len(numbers) == max(1, 1000 // length)


def test_the_optimizer_gives_the_weights_of_the_packages():
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


def test_the_learning_rate_follows_the_schedule_of_the_package():
    rate = schedule(1.0, 1000)
    for step in (0, 20, 40, 100, 500, 1000):
        tolerance = 1e-3 if step >= 40 else 0.03  # the recipe's warm-up starts at 0
        expected = float(rate(mx.array(step)))
        assert rate_share(step / 1000) == pytest.approx(expected, abs=tolerance)


def test_the_loss_is_that_of_the_package():
    random = np.random.default_rng(5)
    ids = np.sort(random.choice(VOCABULARY, 20, replace=False))
    logits = random.normal(size=(30, 20)).astype("f")
    choices = random.integers(0, VOCABULARY, 30)
    tops = np.stack([random.choice(VOCABULARY, 6, replace=False) for _ in range(30)])
    shares = random.uniform(0, 0.15, (30, 6)).astype("f")
    losses, can_draft = slot_losses(
        torch.tensor(logits),
        ids=torch.tensor(ids),
        choices=torch.tensor(choices),
        tops=torch.tensor(tops),
        shares=torch.tensor(shares),
    )
    draft_ids = np.full(VOCABULARY, -1)  # of the target's tokens; -1: it cannot be drafted
    draft_ids[ids] = np.arange(20)
    labels = draft_ids[choices]
    expected = LossWeights(cross_entropy=0.5, kl=0.5).of(
        mx.array(logits),
        labels=mx.array(np.maximum(labels, 0)),
        tops=mx.array(np.maximum(draft_ids[tops], 0)),
        shares=mx.array(np.where(draft_ids[tops] >= 0, shares, 0)),
    )
    draftable = labels >= 0
    assert np.array_equal(can_draft.numpy(), draftable)
    assert np.allclose(losses.numpy()[draftable], np.array(expected)[draftable], atol=1e-5)
    # A control: the loss is not just the cross-entropy.
    cross_entropy = nn.losses.cross_entropy(mx.array(logits), mx.array(np.maximum(labels, 0)))
    assert not np.allclose(losses.numpy()[draftable], np.array(cross_entropy)[draftable])
