"""Prompts of the kinds that people try on a small chat model, made from seeds and training splits.

No prompt of a test split is among them, and none is made after one. A conversation is a list of
user turns; the target answers each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tiny_pair import corpus
from tiny_pair.strangers import CODE, CREATURES, PLACES, SUBJECTS, THINGS, listed, requests

from dflash_mlx.bench.datasets import numbered_lines

Turns = list[str]

NAMES = """Ada Ben Carla David Elena Felix Grace Hugo Irene Jonas Kim Leo Maria Noah Olga Paul Rosa
Sam Tara Viktor""".split()
JOBS = """astronaut baker bus driver|beekeeper|carpenter|chemist|detective|dentist|farmer|fitness
coach|gardener|historian|judge|librarian|nurse|park ranger|photographer|pilot|plumber|shop owner
tour guide|software engineer|violin teacher""".replace("\n", "|").split("|")
GENRES = listed("""\
advertisement|blog post|business plan|cover letter|diary entry|email|essay|fairy tale|film review
haiku|job description|lesson plan|newspaper article|product description|short story|speech
thank-you note|to-do list|travel report|wedding toast""")
TOPICS = listed("""\
a broken washing machine|a day without electricity|a lost wallet|a new coffee shop|a rainy holiday
an old lighthouse|choosing a first bicycle|cooking for a large family|growing tomatoes
how children learn to read|learning to swim as an adult|moving to another city|night trains
public libraries|renting out a spare room|saving money on heating|sharing a flat|solar panels
starting a small business|the first day in a new job|the history of bread|the night sky
travelling with a dog|used books|volunteering at an animal shelter|working from home""")
STYLES = listed("""\
Keep it short.|Use simple words.|Use a friendly tone.|Use at most 150 words.|Add a title.
Make it funny.|Address the reader directly.|End with a question.|Use headings.||""")
EVENTS = listed("""\
the invention of the printing press|the fall of the Roman Empire|the French Revolution
the moon landings|the industrial revolution|the spread of railways|the Silk Road|the cold war
the discovery of penicillin|the building of the pyramids|women's suffrage|the age of sail
the gold rush|the first Olympic Games|the rise of the internet""")
IDEAS = listed("""\
free will|minimalism|the social contract|supply and demand|stoicism|opportunity cost|utopia
globalization|urban planning|public health|mass media|human rights|monopolies|cultural memory
taxation|voting systems|the scientific method|artificial intelligence""")
NATURE = listed("""\
a magnet loses its strength|a rainbow forms|airplanes stay in the air|antibiotics work|batteries age
bread rises|earthquakes start|glaciers move|leaves turn red|lightning strikes|metal rusts
muscles grow|satellites stay in orbit|soap removes grease|the moon has phases|the sea is salty
tides rise and fall|vaccines protect|volcanoes erupt|water boils at lower temperatures on mountains
we dream|yeast ferments sugar""")
PAIRS = listed("""\
a virus;a bacterium|speed;acceleration|a list;a tuple|weather;climate|mass;weight|TCP;UDP|RNA;DNA
an acid;a base|a star;a planet|heat;temperature|a stack;a queue|mitosis;meiosis|an atom;a molecule
a compiler;an interpreter|renewable energy;fossil fuels|a debit card;a credit card""")
PROGRAMS = listed("""\
adds up the digits of a number|checks whether a word is a palindrome|computes a moving average
converts Roman numerals to integers|counts the words of a text file|downloads a web page
draws a multiplication table|finds the largest value of a dictionary|finds the shortest path
flattens a nested list|generates a random password|groups words by first letter
implements a binary search|implements a linked list|implements a queue with two stacks
keeps a to-do list|merges two sorted lists|parses a CSV line|plays rock, paper, scissors
prints the prime numbers below 100|removes duplicates from a list|reverses every word of a sentence
rotates a matrix|simulates a bank account|solves a quadratic equation|sorts a list with quicksort
tells whether a year is a leap year|validates an email address|zips files of a folder""")
FIELDS = listed("""\
name, date and place|who, what and when|all numbers|the people and their jobs|the main complaint
product, price and rating|the sentiment|all places""")
SHAPES = listed("a list|JSON|a table|one sentence|CSV|bullet points")
PASSAGES = listed("""\
{name}, a {job}, met {other} in {place} on {day} {month}. They bought {n} {things} for {m} dollars.
On {day} {month} the {thing} museum in {place} opened again. \
{name} sold {n} tickets, {other} only {k}.
The new {thing} costs {m} dollars. {name} loves it: 5 stars. {other}, a {job}, gave it 2 stars.
Dear {name}, the {thing} that I ordered on {day} {month} has not arrived. I paid {m} dollars. \
{other}
{name} moved from {place} to {town} in {year} and worked there as a {job} until {late}.
The train from {place} to {town} leaves at {hour}:{m}. {name} and {other} have {n} bags.""")
MONTHS = """January February March April May June July August September October November
December""".split()
SUMS = listed("""\
{name} has {n} {things} and gives {k} of them to {other}. How many are left?
A {thing} costs {m} dollars. How much do {k} of them cost with a discount of {p} percent?
A train travels {d} km in {k} hours. What is its average speed?
If {k}x + {n} = {d}, what is x?
The sides of a rectangle are {n} and {m}. What are area and perimeter?
{name} is {k} years older than {other}. Together they are {d}. How old is {name}?
What is the probability of drawing a red ball from a bag with {n} red and {m} blue balls?
Simplify ({n} + {k}) * {m} - {d} / {k}.|What is {p} percent of {d}?|Factor x^2 + {q}x + {r}.
{name} saves {m} dollars a month. How long does it take to save {d} dollars?
A recipe for {k} people needs {n} eggs. How many eggs are needed for {m} people?
Find the greatest common divisor of {d} and {m}.|What is the derivative of {k}x^3 + {n}x?
How many ways are there to arrange {k} books on a shelf?|Convert {d} minutes to hours and minutes.
The sum of two consecutive numbers is {odd}. What are they?|Is {d} divisible by {k}? Explain.""")
PUZZLES = listed("""\
{name} is taller than {other}, and {other} is taller than {third}. Who is the shortest?
All {things} are {group}. Some {group} are old. Are all {things} old? Explain.
{name} left before {other} but after {third}. Who left first?
Which word does not belong: {thing}, {creature}, {other_creature}, {third_creature}?
If it takes {k} {job}s {k} hours to do {k} jobs, how long does one of them need for one?
I have {n} {things}. All but {k} break. How many do I have?
What comes next: {k}, {k2}, {k4}, {k8}?|Tomorrow is two days before {weekday}. What day is today?
A {creature} weighs as much as three {things}. What do two of them weigh in {things}?""")
ROLES = listed("""\
You are a {job} from {place}. Introduce yourself and tell me about your day.
Pretend to be a {creature} that can talk. What do you think of people?
Act as my {job}. I say: I have a problem with my {thing}.
Imagine that you are a time traveller from the year {late}. What surprised you in {place}?
You are an interviewer. Ask me {k} questions for a job as a {job}, and say what you expect.
Speak like a pirate and explain {subject}.|You are a wise old {creature}. Give me advice on {idea}.
As a {job}, explain to a child why {nature}.|You are {name}, a {job}. Write to your friend {other}.
Play a shop assistant who sells a {thing} to a {job}.""")
ABROAD = listed("""\
Bonjour, comment ça va ?|Qu'est-ce que la photosynthèse ?|Écris un poème sur la mer.
Quelle est la capitale de l'Italie ?|Raconte-moi une histoire courte.|Comment faire du pain ?
Hola, ¿cómo estás?|¿Qué es la fotosíntesis?|Escribe un poema sobre la luna.
¿Cuál es la capital de Francia?|Cuéntame un cuento corto.|¿Cómo se hace una tortilla?
Hallo, wie geht es dir?|Was ist Photosynthese?|Schreibe ein Gedicht über den Wald.
Was ist die Hauptstadt von Spanien?|Erzähle mir eine kurze Geschichte.|Wie backt man Brot?
Ciao, come stai?|Che cos'è la fotosintesi?|Scrivi una poesia sul mare.
Qual è la capitale della Germania?|Raccontami una breve storia.|Come si fa la pizza?
Olá, tudo bem?|O que é a fotossíntese?|Escreva um poema sobre o mar.|Como se faz pão?""")
AFTER = listed("""\
Make it shorter.|Explain that in simpler words.|Give me an example.|Can you say more about that?
Why?|Rewrite it for a child of ten.|Are you sure?|Now do the same as a list.|Write it more formally.
What are the disadvantages?|Summarize that in one sentence.|Translate it into French.
What would an expert say to that?|Continue.|Now make it funny.|Add two more points.
What is the most important part?|Turn it into a poem.|How would you check that it is right?
Thanks! And what should I do next?""")
CODE_AFTER = listed("""\
Explain the code line by line.|Add comments.|Add a test.|Can you make it faster?|Now in JavaScript.
What happens with an empty input?|Write it without a loop.|Add type hints and a docstring.""")
AFTER_SHARE = 0.35  # of the conversations have a second turn
BOXED = 0.6  # of the "maths" prompts end with `MATH_WORDS`
STUB = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\ndef"
)
MATH_WORDS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def filled(rng: Random, pattern: str) -> str:
    """A pattern with random words and numbers in its fields."""
    k = rng.randint(2, 9)
    n = rng.randint(10, 30)
    m = rng.randint(31, 59)
    name, other, third = rng.sample(NAMES, 3)
    creatures = rng.sample(CREATURES, 3)
    places = rng.sample(PLACES, 2)
    root = rng.randint(1, 6)
    things = rng.choice(THINGS) + "s"
    return pattern.format(
        k=k, n=n, m=m, k2=2 * k, k4=4 * k, k8=8 * k, d=k * rng.randint(20, 90),
        odd=2 * m + 1, p=5 * rng.randint(1, 12), q=k + root, r=k * root,
        name=name, other=other, third=third, job=rng.choice(JOBS), idea=rng.choice(IDEAS),
        thing=rng.choice(THINGS), things=things, group=rng.choice(THINGS) + "s",
        creature=creatures[0], other_creature=creatures[1], third_creature=creatures[2],
        place=places[0], town=places[1], subject=rng.choice(SUBJECTS), nature=rng.choice(NATURE),
        day=rng.randint(1, 28), month=rng.choice(MONTHS), hour=rng.randint(6, 22),
        year=rng.randint(1950, 1990), late=rng.randint(1991, 2090),
        weekday=rng.choice("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()),
    )  # fmt: skip


def writing(rng: Random) -> str:
    """A text to write."""
    genre = rng.choice(GENRES)
    topic = rng.choice(TOPICS)
    article = "an" if genre[0] in "aeiou" else "a"
    opening = rng.choice(("Write", "Compose", "Draft", "Please write", "Help me write"))
    whom = rng.choice(("", "", " for my {job}", " by a {job}", " to {name}"))
    wanted = f"{opening} {article} {genre}{whom} about {topic}. {rng.choice(STYLES)}"
    return filled(rng, wanted).strip()


def coding(rng: Random) -> str:
    """A program to write or to explain."""
    language = "Python" if rng.random() < 0.5 else rng.choice([*CODE, "C++", "HTML"])
    task = rng.choice(PROGRAMS)
    kind = rng.choice(("function", "program", "class", "script"))
    return rng.choice((
        f"Write a {language} {kind} that {task}.",
        f"How do I write a {kind} in {language} that {task}?",
        f"Implement a {kind} that {task} in {language}. Explain how it works.",
        f"Give me {language} code that {task}, with comments.",
        f"I need a {language} {kind} which {task}. Handle errors, and show an example.",
    ))  # fmt: skip


def extraction(rng: Random) -> str:
    """Something to find in a short text."""
    text = " ".join(filled(rng, p) for p in rng.sample(PASSAGES, rng.randint(1, 2)))
    fields = rng.choice(FIELDS)
    shape = rng.choice(SHAPES)
    return rng.choice((
        f"Find {fields} in this text, and answer as {shape}.\n\n{text}",
        f"{text}\n\nGive me {fields} as {shape}.",
        f"Summarize the following text as {shape}.\n{text}",
        f"Text: {text}\nQuestion: who is mentioned, and why?",
    ))  # fmt: skip


def knowledge(rng: Random) -> str:
    """A question of science or of the humanities."""
    first, second = rng.choice(PAIRS).split(";")
    event = rng.choice(EVENTS)
    idea = rng.choice(IDEAS)
    subject = rng.choice(SUBJECTS)
    nature = rng.choice(NATURE)
    place = rng.choice(PLACES)
    return rng.choice((
        f"Why is it that {nature}?", f"Explain step by step how it comes that {nature}.",
        f"What is the difference between {first} and {second}? Give examples.",
        f"Compare {first} and {second} in a table.", f"Describe the causes and effects of {event}.",
        f"How did {event} change {place}?", f"Discuss arguments for and against {idea}.",
        f"What does {idea} mean, and why does it matter today?",
        f"Give me five facts about {event}.", f"How is {subject} related to {idea}?",
        f"Write an introduction to {subject} for beginners.",
        f"What are common myths about {idea}?",
        f"I have an exam on {subject}. What should I know?",
    ))  # fmt: skip


def pick(patterns: list[str], ending: str = "") -> Callable[[Random], str]:
    """A function that fills one of these patterns at random, and appends the ending."""
    return lambda rng: filled(rng, rng.choice(patterns)) + ending


def _lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for _, line in numbered_lines(folder / name)]


def stub(row: dict) -> str:
    """A task of MBPP as a function to complete, with two of its tests as examples."""
    call, _, value = row["test_list"][0].removeprefix("assert ").partition("==")
    name = call.partition("(")[0].strip()
    shown = "".join(
        f"    >>> {test.removeprefix('assert ').partition('==')[0].strip()}\n"
        f"    {test.partition('==')[2].strip()}\n"
        for test in row["test_list"][:2]
    )
    return f'{STUB} {name}(*args):\n    """ {row["text"]}\n{shown}    """\n```'


def of_files(folder: Path, rng: Random) -> dict[str, Iterator[str]]:
    """The prompts of public training splits: GSM8K, MBPP (task ids 601 to 974), Self-Instruct."""
    gsm8k = _lines(folder, "gsm8k_train.jsonl")
    seeds = _lines(folder, "seed_tasks.jsonl")
    tasks = _lines(folder, "mbpp.jsonl")
    scored = {row["text"] for row in tasks if row["task_id"] <= 600}
    mbpp = [row for row in tasks if row["task_id"] > 600 and row["text"] not in scored]
    for rows in gsm8k, mbpp, seeds:
        rng.shuffle(rows)
    return {
        "gsm8k": (row["question"] + MATH_WORDS for row in gsm8k),
        "mbpp": (row["text"] for row in mbpp),
        "stubs": (stub(row) for row in mbpp),
        "seeds": (f"{row['instruction']}\n{row['input']}".strip() for row in seeds),
    }


# How turns begin that the target ends, as users ask for mathematics and for programs.
OPENINGS = {
    "maths": listed("""\
Find the|What is the value of|How many|Compute|Solve|If $x|Let $|Simplify|Evaluate|The sum of
What is the|Determine|A circle|In triangle|Suppose|Calculate the|A bag contains|Express|For what
The average of|What is the smallest|Two|Given that|Each|When"""),
    "programs": listed("""\
Write a function to|Write a python function to|Write a Python function that|Write a program
How do I|Given a list of|Given a string|Create a function|def |Implement|Fix this code|Explain this
Write a SQL query|Write a JavaScript function|Write a class|Debug|Write a script|Write code""")
    + 3 * [STUB],
}

# How often prompts are of each kind, relative to the others.
SHARES = {
    "own": 5, "maths": 3, "programs": 3, "writing": 2, "roles": 1, "puzzles": 0.75,
    "sums": 0.5, "boxed": 0.75, "coding": 2, "extraction": 1, "knowledge": 2, "strangers": 2,
    "abroad": 0.25, "corpus": 0.75, "gsm8k": 4, "mbpp": 0.75, "stubs": 0.5, "seeds": 0.25,
}  # fmt: skip


def conversations(
    folder: Path, written: dict[str, list[str]], seed: int
) -> Iterator[tuple[str, Turns]]:
    """Pairs of (kind, user turns), endless and without repeated first turns.

    A kind of which there are no more is left out from then on.

    Args:
        folder: of the public training splits.
        written: first turns that the target wrote, by kind.
        seed: of everything that is drawn.
    """
    rng = Random(seed)

    def made(kind: Callable[[Random], str]) -> Iterator[str]:
        while True:
            yield kind(rng)

    streams: dict[str, Iterator[str]] = {
        **{kind: iter(turns) for kind, turns in written.items()},
        "writing": made(writing),
        "roles": made(pick(ROLES)),
        "puzzles": made(pick(PUZZLES)),
        "sums": made(pick(SUMS)),
        "boxed": made(pick(SUMS, MATH_WORDS)),
        "coding": made(coding),
        "extraction": made(extraction),
        "knowledge": made(knowledge),
        "strangers": requests(seed),
        "abroad": iter(rng.sample(ABROAD, len(ABROAD))),
        "corpus": (c.messages[0]["content"] for c in corpus.conversations(seed)),
        **of_files(folder, rng),
    }
    seen: set[str] = set()
    while streams:
        [kind] = rng.choices([*streams], [SHARES[kind] for kind in streams])
        turn = next(streams[kind], None)
        if turn is None:
            del streams[kind]
        elif turn not in seen:
            seen.add(turn)
            if kind == "maths" and rng.random() < BOXED:
                turn += MATH_WORDS
            after = CODE_AFTER if kind in ("coding", "programs", "mbpp") else AFTER
            more = [rng.choice(after)] if rng.random() < AFTER_SHARE else []
            yield kind, [turn, *more]
