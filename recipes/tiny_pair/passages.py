"""Synthetic text with one expected wording: small Python functions, stories, questions about
DFlash.

These sets are closed, so a problem here is a *combination* (function x name x wording, the slots
of a story, fact x wording); combinations are held out, their parts are all seen in training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .problems import Turn

# What it does, name, parameters, body, example arguments, example result.
FUNCTIONS = (
    ("adds two numbers", "add", "a, b", "return a + b", "2, 3", "5"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b", "5, 3", "2"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b", "2, 3", "6"),
    ("returns the square of a number", "square", "x", "return x * x", "4", "16"),
    ("checks whether a number is even", "is_even", "n", "return n % 2 == 0", "4", "True"),
    ("checks whether a number is odd", "is_odd", "n", "return n % 2 == 1", "4", "False"),
    ("reverses a string", "reverse", "text", "return text[::-1]", "'abc'", "'cba'"),
    ("checks whether a string is a palindrome", "is_palindrome", "text",
     "return text == text[::-1]", "'level'", "True"),
    ("sums a list", "total", "items",
     "result = 0\nfor item in items:\n    result = result + item\nreturn result",
     "[1, 2, 3]", "6"),
    ("finds the largest item of a list", "largest", "items",
     "best = items[0]\nfor item in items:\n    if item > best:\n        best = item\nreturn best",
     "[1, 5, 2]", "5"),
    ("finds the smallest item of a list", "smallest", "items",
     "best = items[0]\nfor item in items:\n    if item < best:\n        best = item\nreturn best",
     "[4, 1, 2]", "1"),
    ("counts the items of a list", "count_items", "items",
     "count = 0\nfor item in items:\n    count = count + 1\nreturn count", "[1, 2]", "2"),
    ("computes a factorial", "factorial", "n",
     "result = 1\nfor i in range(1, n + 1):\n    result = result * i\nreturn result", "4", "24"),
    ("computes a Fibonacci number", "fibonacci", "n",
     "a, b = 0, 1\nfor i in range(n):\n    a, b = b, a + b\nreturn a", "6", "8"),
    ("computes the average of a list", "average", "items",
     "result = 0\nfor item in items:\n    result = result + item\nreturn result / len(items)",
     "[2, 4]", "3.0"),
    ("keeps the even numbers of a list", "keep_even", "items",
     "result = []\nfor item in items:\n    if item % 2 == 0:\n"
     "        result.append(item)\nreturn result",
     "[1, 2, 4]", "[2, 4]"),
)  # fmt: skip
CODE_PROMPTS = (
    "Write a Python function that {}",
    "Write a function that {} in Python",
    "Please write Python code that {}",
    "Show me a Python function that {}",
    "I need a Python function that {}",
)
CUSTOM_NAMES = (
    "f", "g", "helper", "solve", "compute", "run", "check", "work", "my_function", "test",
)  # fmt: skip


def code(rng: Random) -> Turn:
    """A function of the list, under its own or a custom name, with an example call."""
    task, own_name, parameters, body, arguments, result = rng.choice(FUNCTIONS)
    wording = rng.choice(CODE_PROMPTS)
    custom = rng.random() < 0.6
    name = rng.choice(CUSTOM_NAMES) if custom else own_name
    prompt = wording.format(task) + (f". Call it {name}." if custom else ".")
    indented = "\n".join("    " + line for line in body.split("\n"))
    answer = (
        f"Here is a Python function that {task}:\n```python\ndef"
        f" {name}({parameters}):\n{indented}\n```\n"
        f"The function {name} {task}. For example, {name}({arguments}) gives {result}."
    )
    return Turn("code", prompt, answer, (f"code {wording} {task} {name}",))


NAMES = (
    "Mia", "Leo", "Ana", "Sam", "Zoe", "Max", "Eva", "Tom", "Ivy", "Ben", "Lily", "Noah", "Ruby",
    "Finn", "Nora", "Owen",
)  # fmt: skip
ANIMALS = {
    "fox": ("quick", "den"), "owl": ("wise", "tree"), "bear": ("big", "cave"),
    "rabbit": ("shy", "burrow"), "cat": ("curious", "house"), "dog": ("loyal", "yard"),
    "mouse": ("tiny", "barn"), "duck": ("cheerful", "pond"), "frog": ("green", "pond"),
    "turtle": ("slow", "garden"),
}  # fmt: skip
THINGS = {
    "key": ("opened an old wooden box", '"Who lost this key?" asked {}. Nobody answered.'),
    "map": ("showed the way to a hidden waterfall", '"What a strange map!" said {}.'),
    "lamp": ("lit up the whole path", "{} was very happy, because the night was dark and cold."),
    "book": ("was full of funny songs", "{} picked it up with care and called all the friends."),
    "bell": ("rang with a bright clear sound", "{} had never heard a bell before."),
    "coin": ("shone like a little sun", "{} wanted to share it with a friend right away."),
    "feather": ("was softer than a cloud", "The wind was strong that day, but {} held it tight."),
    "seed": ("grew into a tall flower", "{} sat down next to it and waited until evening."),
    "shell": ("sounded like the sea", "{} held it close and listened for a long time."),
    "kite": ("flew high above the hills", "{} ran with it as fast as the wind."),
}
PLACES = ("forest", "beach", "hills", "river", "garden", "village", "meadow", "valley")
STORY_PROMPTS = (
    "Tell a short story about a {a} named {n} who finds a {t} in the {p}.",
    "Write a story about {n} the {a} and a {t} in the {p}.",
    "Tell me a story about a {a} called {n} and a {t} near the {p}.",
    "Please tell me a story about {n} the {a}, a {t} and the {p}.",
)


def story(rng: Random) -> Turn:
    """A short story whose wording follows from its hero, animal, thing and place."""
    n = rng.choice(NAMES)
    a = rng.choice([*ANIMALS])
    t = rng.choice([*THINGS])
    p = rng.choice(PLACES)
    temper, home = ANIMALS[a]
    deed, reaction = THINGS[t]
    answer = (
        f"Once upon a time there was a {temper} {a} named {n}. {n} the {a} lived in a {home}"
        f" near the {p}.\nOne morning {n} walked through the {p} and found a {t}. "
        f"{reaction.format(n)}\nThe {t} {deed}. From that day on, {n} the {a} was never lonely"
        f" in the {p} again.\nThe end."
    )
    prompt = rng.choice(STORY_PROMPTS).format(a=a, n=n, t=t, p=p)
    return Turn("story", prompt, answer, (f"story {n} {a} {t} {p}",))


# Ways to ask, and the one answer. Every way is combined with every opening below.
FACTS = (
    (("What is DFlash?", "Explain DFlash.", "Tell me about DFlash.", "What does DFlash do?"),
     "DFlash is a method for speculative decoding. A small draft model proposes a whole block"
     " of tokens"
     " at once with block diffusion, and the target model checks the block in one forward pass."
     " Correct"
     " tokens are kept, so the output is the same as without drafting, only faster."),
    (("What is dflash-mlx?", "What is this project?", "Tell me about dflash-mlx.",
      "Explain this project."),
     "dflash-mlx is a port of DFlash to MLX. It runs block diffusion drafters next to a target"
     " model"
     " from mlx-lm, and it can also train a drafter for your own model."),
    (("What is speculative decoding?", "Explain speculative decoding.",
      "How does speculative decoding work?", "Tell me about speculative decoding."),
     "Speculative decoding uses a small and fast draft model to guess several tokens. The large"
     " target"
     " model verifies all guesses in one forward pass. The longest correct prefix is accepted,"
     " and the"
     " target adds one token of its own."),
    (("What is a drafter?", "What is a draft model?", "What does the drafter do?",
      "Explain the drafter."),
     "A drafter is a small model that guesses the next tokens. In DFlash it reads hidden states"
     " of the"
     " target model and fills a block of mask tokens in a single step."),
    (("What is a target model?", "What does the target model do?", "Explain the target model.",
      "Tell me about the target model."),
     "The target model is the model whose answers you want. It verifies the block proposed by the"
     " drafter and decides which tokens are kept."),
    (("What is the block size?", "How big is a block?", "What does block size mean?",
      "Explain the block size."),
     "The block size is the number of positions in one draft block. The default is 16: one"
     " known token"
     " and 15 mask tokens that the drafter fills in."),
    (("What is acceptance length?", "What does acceptance length mean?",
      "Explain acceptance length.", "Tell me about the acceptance length."),
     "The acceptance length is the mean number of tokens gained in one verify step, counting"
     " the bonus"
     " token from the target model. A longer acceptance length means fewer forward passes."),
    (("What is MLX?", "Explain MLX.", "Tell me about MLX.", "What does MLX do?"),
     "MLX is an array framework for machine learning. It runs on Apple silicon and also on"
     " plain CPUs,"
     " and mlx-lm uses it to run language models."),
    (("Is the output the same as without DFlash?", "Does DFlash change the output?",
      "Is DFlash lossless?", "Is the text the same with DFlash?"),
     "Yes, it is lossless. With greedy decoding every accepted token is exactly the token that"
     " the"
     " target model would have chosen."),
    (("Who are you?", "What are you?", "What model are you?", "Tell me about yourself."),
     "I am a tiny language model that ships with dflash-mlx. I was trained on a small synthetic"
     " corpus,"
     " so I can do simple arithmetic, counting, unit conversion, short stories and small Python"
     " functions."),
    (("What can you do?", "How can you help me?", "What can I ask you?", "Help me."),
     "I can add, subtract and multiply small numbers, count, convert units, write small Python"
     " functions, tell short stories and answer questions about DFlash."),
    (("How do I train a drafter?", "How can I train a drafter?", "How is the drafter trained?",
      "Explain how to train a drafter."),
     "First collect answers of the target model. Then freeze the target, pick random anchor"
     " tokens,"
     " mask the block after each anchor, and train the drafter to fill in the block from the"
     " hidden"
     " states of the target."),
    (("How do I start a chat?", "How do I use dflash-mlx?", "How do I run dflash-mlx?",
      "How can I start dflash-mlx?"),
     "Run this command in a shell:\n```\ndflash-mlx chat\n```\nThen type a question and press"
     " enter."),
    (("What are target layer ids?", "Which layers does the drafter read?",
      "Explain target layer ids.", "What do the target layer ids mean?"),
     "The target layer ids list the layers of the target model whose hidden states are given to"
     " the"
     " drafter. They are joined and projected to one context feature per token."),
    (("What is a mask token?", "What does the mask token do?", "Explain the mask token.",
      "Tell me about the mask token."),
     "The mask token is a special token that marks an unknown position in a draft block. The"
     " drafter"
     " replaces every mask token with a guess in one step."),
    (("Why is DFlash fast?", "Why is drafting faster?", "How does DFlash save time?",
      "Explain why DFlash is fast."),
     "One forward pass over 16 tokens costs little more than a pass over one token. If many draft"
     " tokens are accepted, the target model needs far fewer passes."),
    (("How are you?", "How are you today?", "Are you well?", "How do you feel?"),
     "I am fine, thank you. I am a tiny language model. Ask me for a sum, a story or a small"
     " Python"
     " function."),
)  # fmt: skip
OPENINGS = ("", "Hello! ", "Hi! ", "Please tell me: ", "I have a question. ", "Quick question: ",
            "One more thing: ", "Can you help? ")  # fmt: skip
GREETINGS = (
    "Hello!", "Hi!", "Hey!", "Good morning!", "Hello there!", "Good evening!", "Hello", "Hi",
)  # fmt: skip
THANKS = (
    "Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Great, thanks!", "Bye!",
)  # fmt: skip


def question(rng: Random) -> Turn:
    """A question about DFlash or the model itself."""
    wordings, answer = rng.choice(FACTS)
    wording = rng.choice(wordings)
    opening = rng.choice(OPENINGS)
    return Turn("qa", opening + wording, answer, (f"qa {opening}{wording}",))


def greeting(rng: Random) -> Turn:
    """A turn that opens a conversation. There are too few to hold some out, so it has no keys."""
    return Turn("chat", rng.choice(GREETINGS), "Hello! How can I help you today?", ())


def farewell(rng: Random) -> Turn:
    """A turn that closes a conversation, without keys either."""
    return Turn("chat", rng.choice(THANKS), "You are welcome! Ask me again any time.", ())


GENERATORS: dict[Callable[[Random], Turn], float] = {code: 1.8, story: 1.2, question: 1.7}
