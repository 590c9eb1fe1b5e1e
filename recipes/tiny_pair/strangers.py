"""Requests that the corpus knows nothing about: what people type who try a model out.

The target was never trained on such requests, so its answers are nonsense, and a drafter that has
seen only the corpus is wrong about most of them. Only the requests are made here:
drafters learn what the target says to them (`dflash_mlx.train.answer_writer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


def listed(text: str) -> list[str]:
    """The items of a text, which bars and line ends separate."""
    return [item for line in text.split("\n") for item in line.split("|")]


THINGS = """apple bicycle book bread bridge cake camera candle car castle chair cheese city clock
cloud coffee computer desert door dream engine farm fire flower forest garden glass guitar hammer
house ice island jacket kitchen lake lamp letter library map market mirror money moon mountain
museum music newspaper ocean orange painting paper pencil phone piano picture plane pizza potato
prison radio rain river road robot salt school ship shoe snow soup spoon star storm street summer
sun table tea telescope theatre ticket tomato tower toy train tree umbrella village violin wall
watch water wheel wind window winter wine""".split()
CREATURES = """ant bear bee bird bull camel chicken cow crab crow deer dolphin dragon eagle elephant
fish frog ghost giant goat goose hamster hedgehog horse king knight lion lizard monkey mouse owl
parrot penguin pig pirate prince princess queen rabbit rat shark sheep snail snake spider squirrel
teacher thief tiger wizard wolf""".split()
SUBJECTS = """algebra anger art astronomy beauty biology boredom chemistry chess climate cooking
courage dancing democracy economics education electricity evolution fashion fear fishing football
freedom friendship grammar happiness health history honesty hope inflation jazz justice language
law light logic magnetism mathematics medicine memory money opera patience philosophy physics
poetry politics rainbows religion sleep sound space success swimming tennis time trade travel
truth volcanoes war weather writing yoga""".split()
PLACES = """Africa Athens Australia Berlin Boston Brazil Cairo Canada Chicago China Denmark Egypt
England Europe Finland Greece Iceland India Ireland Italy Japan Kenya Lisbon London Madrid Mexico
Moscow Norway Oslo Paris Peru Poland Portugal Prague Russia Scotland Spain Sweden Sydney Texas
Tokyo Turkey Venice Vienna""".split()
PEOPLE = """Aristotle Bach Beethoven Caesar Chopin Churchill Cleopatra Columbus Darwin Dickens
Einstein Euclid Galileo Gandhi Goethe Homer Kafka Lincoln Mozart Napoleon Newton Picasso Plato
Rembrandt Socrates Tolstoy Verdi Vermeer Voltaire Washington""".split()
WORKS = """Carmen Dracula Emma Faust Frankenstein Ivanhoe Macbeth Othello Pinocchio Tosca
Ulysses""".split()
TONGUES = "Chinese Danish Dutch English French Greek Italian Japanese Latin Polish Spanish".split()
ROLES = "aunt boss brother class colleague doctor friend landlord neighbour sister team".split()
MANNERS = "angry brave clever cold famous funny happy huge lazy little lonely old sad shy".split()
FORMS = """ballad dialogue fable headline letter limerick paragraph poem riddle song speech story
summary tweet""".split()
DISHES = "bread cake chili curry dumplings lasagna omelettes pasta pie risotto salad soup".split()
PHRASES = listed("""\
good night|thank you|where is the station|I am hungry|see you soon|the book is red|my name is Anna
how much is it|happy birthday|the train is late""")
TASKS = listed("""\
checks a password|counts vowels|draws a circle|finds duplicates in a list|merges two lists
parses a date|prints a calendar|reads a file|removes spaces from a string|rolls dice
sorts words by length|swaps two variables|turns celsius into fahrenheit|writes a CSV file""")
CODE = listed("bash|C|Go|Java|JavaScript|Python|Rust|SQL")
UNITS = "days hours minutes months seconds weeks years".split()
ASKED = listed("""\
What is {subject}?|What is a {thing}?|What is the meaning of {subject}?
Why do people like {subject}?|Define {subject}.|Explain {subject}.
Explain {subject} in simple words.|Explain how a {thing} works.|Explain {subject} to a {creature}.
How does a {thing} work?|How is a {thing} made?|What does a {creature} eat?
Tell me something about {subject}.|Tell me about {place}.|Tell me about the {creature}.
Talk about {subject}.|Describe a {thing}.|Describe a {manner} {creature}.
Describe {place} in one sentence.|Describe your {thing}.|Who was {person}?|When was {person} born?
Who painted the {thing}?|Who composed {work}?|What is {work} about?
What is the population of {place}?|Where is {place}?|How far is {place} from {other}?
Is {place} bigger than {other}?|What is the best time to visit {place}?|Plan a weekend in {place}.
What should I see in {place}?|Is it cold in {place}?|Write a {form} about a {creature}.
Write a {form} about {subject}.|Write a short {form} about the {thing}.|Write a {manner} {form}.
Write me a {form}.|A {form} about {place}, please.|Make up a {form}.|Sing a {form}.
Write a {form} for my {role}.|Write a letter to my {role} about a {thing}.
What should I say to my {role}?|Tell me a {form} about a {creature} and a {thing}.
Tell a {manner} story.|Tell me a fact about {subject}.
There was a {manner} {creature} who lived in a {thing}|It was a {manner} night in {place}
My {role} is a {creature}|Give me {n} words that rhyme with {thing}.
Give me {n} names for a {creature}.|Give me some advice on {subject}.|List {n} kinds of {thing}.
List the parts of a {thing}.|Name {n} cities in {place}.|Name a famous {creature}.
Write a {code} program that {task}.|How do I write code that {task}?|A {code} function that {task}
Translate '{phrase}' into {tongue}.|How do you say '{phrase}' in {tongue}?
Is {tongue} hard to learn?|How do I make {dish}?|What goes well with {dish}?
A recipe for {dish}, please.|I want to cook {dish}.|How long are {n} {unit}?
Are {n} {unit} longer than {m}?|What is {n} percent of {m}?|Is {m} larger than {n}?
Divide {m} by {n}.|What comes after {m}?|Is {m} even?|Round {m} to the nearest ten.
Sort these words: {thing}, {creature}, {subject}.|Order these from small to large: {m}, {n}, {k}.
Do you like {subject}?|Can you play the {thing}?|Are you a {creature}?|How old are you?
Where do you come from?|I feel {manner} today.|I am learning {tongue}.|I lost my {thing}.
My {creature} is {manner}.|I have {n} {unit}.|Compare a {thing} with a {creature}.
What is the difference between {subject} and {another}?|Should I buy a {thing}?
What would a {creature} do in {place}?|Why is the {thing} {manner}?|Why are some people {manner}?
Rewrite this: the {creature} saw a {thing}.|Correct this: me and my {role} goes to {place}.
Continue: the {thing} was {manner}
Shorten this: I went to {place} with my {role}, and we bought a {thing} there for {n} dollars.
Good afternoon!|Good evening|hey|ok|yes|no|help|thanks a lot|test|continue|more|why?|really?|Bye
what can you do?|{thing}|{creature}|{subject}|{manner} {creature}|{place}""")
ENDS = ".?!"
BARE = 0.15  # of the requests come without the punctuation at their end


def requests(seed: int) -> Iterator[str]:
    """The endless stream of requests of a seed; some come more than once."""
    rng = Random(seed)
    lists = {
        "thing": THINGS, "creature": CREATURES, "subject": SUBJECTS, "another": SUBJECTS,
        "place": PLACES, "other": PLACES, "person": PEOPLE, "work": WORKS, "tongue": TONGUES,
        "role": ROLES, "manner": MANNERS, "form": FORMS, "dish": DISHES, "phrase": PHRASES,
        "task": TASKS, "code": CODE, "unit": UNITS,
    }  # fmt: skip
    while True:
        words = {name: rng.choice(words) for name, words in lists.items()}
        numbers = {name: str(rng.randint(2, 99)) for name in "nmk"}
        request = rng.choice(ASKED).format(**words, **numbers)
        yield request.rstrip(ENDS) if rng.random() < BARE else request


def bare(request: str) -> str:
    """A request without capitals and the punctuation at its end, which people may leave out."""
    return request.rstrip(ENDS).lower()
