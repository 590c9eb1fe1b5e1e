"""Synthetic problems with one right answer: arithmetic, counting, unit conversion.

Answers spell out every step in lines of fixed structure (two-digit column sums, the carry always
named), for two reasons. A tiny target computes reliably only what it can write down, and a block
drafter, which fills all its slots at once, needs to know *where* a digit will stand before it
knows *which* digit it is.

Every generator takes a `random.Random` and returns a `Turn`. `Turn.keys` name the problem and every
problem its steps solve on the way, free of phrasing and operand order; the split in `corpus` hashes
them, so a held-out sum cannot leak into training as the last step of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Turn:
    """One question with its answer; `keys` identify the problems it contains."""

    category: str
    prompt: str
    answer: str
    keys: tuple[str, ...]


COLUMNS = ("Ones", "Tens", "Hundreds", "Thousands")

ADD_PROMPTS = (
    "What is {} + {}?",
    "Calculate {} + {}.",
    "Add {} and {}.",
    "Please add {} and {}.",
    "{} + {} = ?",
    "How much is {} plus {}?",
)
SUBTRACT_PROMPTS = (
    "What is {} - {}?",
    "Calculate {} - {}.",
    "{} - {} = ?",
    "Please work out {} - {}.",
    "How much is {} minus {}?",
)
MULTIPLY_PROMPTS = (
    "What is {} x {}?",
    "Multiply {} by {}.",
    "Calculate {} x {}.",
    "{} * {} = ?",
    "How much is {} times {}?",
)


def sum_keys(a: int, b: int) -> tuple[str, ...]:
    """The key of a + b, the same for b + a; none for small steps, which counting is full of."""
    return (f"{min(a, b)}+{max(a, b)}",) if min(a, b) > 10 else ()


def difference_keys(a: int, b: int) -> tuple[str, ...]:
    """The key of a - b; none where b or the result is a small step, as in counting."""
    return (f"{a}-{b}",) if min(b, a - b) > 10 else ()


def product_keys(a: int, b: int) -> tuple[str, ...]:
    """The key of a x b, the same for b x a; none for round numbers, which are steps of others."""
    return (f"{min(a, b)}x{max(a, b)}",) if max(a, b) % 10 else ()


def addition_steps(a: int, b: int) -> list[str]:
    """Column addition, one line a column; the carry is always written, and sums in two digits."""
    lines = []
    carry = 0
    width = len(str(max(a, b)))
    for column in range(width):
        x = a // 10**column % 10
        y = b // 10**column % 10
        total = x + y + carry
        lines.append(
            f"{COLUMNS[column]}: {x} + {y} + {carry} = {total:02d},"
            f" write {total % 10}, carry {total // 10}."
        )
        carry = total // 10
    return lines


def subtraction_steps(a: int, b: int) -> list[str]:
    """Column subtraction for a >= b, one line a column; the borrow is always written."""
    lines = []
    borrow = 0
    for column in range(len(str(a))):
        x = a // 10**column % 10
        y = b // 10**column % 10
        difference = x - y - borrow
        lines.append(
            f"{COLUMNS[column]}: {x} - {y} - {borrow}, borrow {int(difference < 0)},"
            f" write {difference % 10}."
        )
        borrow = int(difference < 0)
    return lines


def operand(rng: Random) -> int:
    """A number of one to three digits; long ones are common, because copying them is hard."""
    ranges = ((1, 10), (10, 100), (10, 100), (100, 1000), (100, 1000))
    return rng.randrange(*rng.choice(ranges))


def addition(rng: Random) -> Turn:
    a = operand(rng)
    b = operand(rng)
    lines = [f"Let us add {a} and {b} digit by digit.", *addition_steps(a, b)]
    lines.append(f"So {a} + {b} = {a + b}.")
    prompt = rng.choice(ADD_PROMPTS).format(a, b)
    return Turn("arithmetic", prompt, "\n".join(lines), sum_keys(a, b))


def subtraction(rng: Random) -> Turn:
    b, a = sorted((operand(rng), operand(rng)))
    lines = [f"Let us subtract {b} from {a} digit by digit.", *subtraction_steps(a, b)]
    lines.append(f"So {a} - {b} = {a - b}.")
    prompt = rng.choice(SUBTRACT_PROMPTS).format(a, b)
    return Turn("arithmetic", prompt, "\n".join(lines), difference_keys(a, b))


def product_steps(a: int, b: int) -> list[str]:
    """a x b for a one-digit a and a two-digit b: split b, two products, one column addition."""
    tens = b // 10 * 10
    ones = b % 10
    return [
        f"Split {b} into {tens} and {ones}.",
        f"{a} x {tens} = {a * tens}.",
        f"{a} x {ones} = {a * ones}.",
        f"Let us add {a * tens} and {a * ones} digit by digit.",
        *addition_steps(a * tens, a * ones),
    ]


def product_sum_keys(a: int, b: int) -> tuple[str, ...]:
    """The key of the addition inside `product_steps`."""
    return sum_keys(a * (b // 10 * 10), a * (b % 10))


def multiplication(rng: Random) -> Turn:
    a = rng.randrange(2, 10)
    b = rng.randrange(10, 100)
    keys = product_keys(a, b) + product_sum_keys(a, b)
    lines = [*product_steps(a, b), f"So {a} x {b} = {a * b}."]
    prompt = rng.choice(MULTIPLY_PROMPTS).format(*rng.choice(((a, b), (b, a), (a, b))))
    return Turn("arithmetic", prompt, "\n".join(lines), keys)


WORDS = ("apple", "star", "tree", "bird", "fish", "drum", "leaf", "moon", "hello", "tea")


def count_by_one(rng: Random) -> Turn:
    """Up or down by one; every line names the goal, so that the end is seen from the last line."""
    low = rng.randrange(0, 84)
    high = low + rng.randrange(6, 16)
    if rng.random() < 0.6:  # more often, because counting down is harder to learn
        first = high
        last = low
        word = "down to"
        prompts = ("Count down from {} to {}.", "Count backwards from {} to {}.")
    else:
        first = low
        last = high
        word = "up to"
        prompts = ("Count from {} to {}.", "Please count up from {} to {}.")
    numbers = range(first, last + 1) if first < last else range(first, last - 1, -1)
    lines = [f"{n}, {word} {last}" for n in numbers]
    answer = "\n".join([f"Counting from {first} to {last}:", *lines, "That is all."])
    prompt = rng.choice(prompts).format(first, last)
    return Turn("counting", prompt, answer, (f"count {low} {high} 1",))


def step_lines(first: int, move: int, count: int, goal: str = "") -> list[str]:
    """`count` sums or differences that lead on from `first`, one a line."""
    sign = "-" if move < 0 else "+"
    steps = range(first, first + move * count, move)
    return [f"{n} {sign} {abs(move)} = {n + move}{goal}" for n in steps]


def count_by_step(rng: Random) -> Turn:
    """Up or down by a step, each step written as the sum or difference it is."""
    step = rng.choice((2, 3, 4, 5, 10))
    count = rng.randrange(4, 10)
    low = rng.randrange(0, 100 - step * count)
    high = low + step * count
    if rng.random() < 0.6:
        first = high
        last = low
        move = -step
        word = "down to"
        prompts = (
            "Count down from {} to {} by {}.",
            "Count backwards from {} to {} in steps of {}.",
        )
    else:
        first = low
        last = high
        move = step
        word = "up to"
        prompts = ("Count from {} to {} by {}.", "Please count from {} to {} in steps of {}.")
    lines = step_lines(first, move, count, f", {word} {last}")
    answer = "\n".join([f"Counting from {first} to {last} by {step}:", *lines, "That is all."])
    prompt = rng.choice(prompts).format(first, last, step)
    return Turn("counting", prompt, answer, (f"count {low} {high} {step}",))


def continue_sequence(rng: Random) -> Turn:
    """Find the step of a sequence from its first two numbers and continue it by six."""
    step = rng.choice((1, 2, 3, 4, 5, 10))
    low = rng.randrange(0, 100 - step * 8)
    if rng.random() < 0.5:
        first = low
        move = step
        word = "up"
    else:
        first = low + step * 8
        move = -step
        word = "down"
    a = first
    b = first + move
    c = first + 2 * move
    lines = [f"{max(a, b)} - {min(a, b)} = {step}, so the numbers go {word} by {step}."]
    lines += [*step_lines(c, move, 6), "And so on."]
    prompts = ("Continue the sequence {}, {}, {}.", "What comes after {}, {}, {}?")
    prompt = rng.choice(prompts).format(a, b, c)
    return Turn("counting", prompt, "\n".join(lines), (f"sequence {low} {step}",))


def repeat_word(rng: Random) -> Turn:
    """A numbered list of one word."""
    word = rng.choice(WORDS)
    times = rng.randrange(2, 16)
    prompts = ("Repeat the word {} {} times.", "Write the word {} {} times.", "Say {} {} times.")
    answer = "\n".join(f"{i} of {times}: {word}" for i in range(1, times + 1))
    prompt = rng.choice(prompts).format(word, times)
    return Turn("counting", prompt, answer, (f"repeat {word} {times}",))


UNITS = (
    ("km", "m", 1000), ("kg", "g", 1000), ("l", "ml", 1000), ("m", "mm", 1000),
    ("m", "cm", 100), ("euros", "cents", 100), ("dollars", "cents", 100),
    ("cm", "mm", 10), ("hours", "minutes", 60), ("minutes", "seconds", 60),
    ("days", "hours", 24), ("years", "months", 12), ("feet", "inches", 12), ("weeks", "days", 7),
    ("yards", "feet", 3),
)  # fmt: skip
UNIT_PROMPTS = (
    "Convert {0} {1} to {2}.",
    "How many {2} are in {0} {1}?",
    "What is {0} {1} in {2}?",
    "Please convert {0} {1} into {2}.",
    "How many {2} are {0} {1}?",
)


def digit_product_steps(digit: int, n: int) -> list[str]:
    """digit x n for n below 100."""
    return [f"{digit} x {n} = {digit * n}."] if n < 10 else product_steps(digit, n)


def factor_steps(n: int, factor: int) -> list[str]:
    """n x factor for the factors in UNITS, by the shortest rule a tiny model can follow."""
    if factor in (10, 100, 1000):
        zeros = "1 zero" if factor == 10 else f"{len(str(factor)) - 1} zeros"
        return [f"Put {zeros} after {n}: {n * factor}."]
    if factor == 60:
        return [*digit_product_steps(6, n), f"Put 1 zero after {n * 6}: {n * 60}."]
    if factor < 10:
        return digit_product_steps(factor, n)
    return product_steps(n, factor)


def factor_keys(n: int, factor: int) -> tuple[str, ...]:
    """The keys of the products and sums in `factor_steps`; none if it has no two-digit product."""
    if 10 < factor < 60:
        digit = n
        other = factor
    else:
        digit = 6 if factor == 60 else factor  # 60 is written as 6 and a zero
        other = n
    if digit >= 10 or other < 10:
        return ()
    return product_keys(digit, other) + product_sum_keys(digit, other)


def units(rng: Random) -> Turn:
    """Convert a whole number of a large unit into a small one."""
    large, small, factor = rng.choice(UNITS)
    ranges = [(2, 10)]  # one for each length, so that short numbers are as common as long ones
    if not 10 < factor < 60:
        ranges.append((10, 100))
    if factor in (10, 100, 1000):
        ranges.append((100, 1000))
    n = rng.randrange(*rng.choice(ranges))
    lines = [f"Each of the {n} {large} has {factor} {small}.", *factor_steps(n, factor)]
    lines.append(f"So {n} {large} = {n * factor} {small}.")
    prompt = rng.choice(UNIT_PROMPTS).format(n, large, small)
    keys = (f"{n} {large} {small}", *factor_keys(n, factor))
    return Turn("units", prompt, "\n".join(lines), keys)


GENERATORS: dict[Callable[[Random], Turn], float] = {
    addition: 1.4,
    subtraction: 1.4,
    multiplication: 1.3,
    count_by_one: 1.8,
    count_by_step: 2.3,
    continue_sequence: 2.0,
    repeat_word: 0.7,
    units: 2.2,
}
