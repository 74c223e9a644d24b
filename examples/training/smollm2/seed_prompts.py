"""Build user turns; the answers of the target become the training text."""

import random
from collections.abc import Callable

TOPICS = """
a bicycle|a city park|a coral reef|a glacier|a library|a lighthouse|a marathon|a museum|a rainforest
a solar panel|a volcano|a wind turbine|antibiotics|ants|apples|astronomy|autumn|bacteria
baking bread|bees|birds that migrate|black holes|bridges|budgeting|butterflies|camping
carbon dioxide|cats|cheese|chemistry|chess|chocolate|cities|climate|clouds|coffee|comets|compost
computers|cooking pasta|cotton|crystals|dams|deserts|diamonds|dinosaurs|dogs|dreams|earthquakes
eclipses|elections|electric cars|electricity|elephants|emails at work|erosion|evolution|exercise
farming|fire safety|first aid|fishing|flowers|folk music|forests|fossils|friendship|fungi
games for children|gardening|genes|geometry|gold|gravity|guitars|habits|hiking|history of writing
honey|horses|hospitals|hurricanes|ice cream|inflation|insects|insurance|internet safety|interviews
iron|islands|jazz|job searching|kindness|kites|lakes|languages|learning to read|leadership|lightning
lungs|magnets|maps|markets|mathematics|medicine|memory|metals|meteors|microscopes|milk|mirrors|money
moon phases|mountains|movies|music lessons|neighbors|newspapers|nurses|nutrition|oceans|oil
olive oil|online classes|owls|oxygen|painting|paper|penguins|photography|photosynthesis|pianos
planets|plastic|plays|poetry|pollution|potatoes|privacy|probability|programming|proverbs
public speaking|pumpkins|radio|railways|rain|recycling|remote work|rivers|robots|roses|running|salt
sand|satellites|saving energy|schools|sculpture|seeds|sharks|ships|sleep|small businesses|snow|soap
soccer|soil|solar systems|sound|soup|space travel|spiders|sports|stars|steam engines|storms|stress
sugar|summer|sunlight|swimming|tea|teamwork|telescopes|tennis|the brain|the eye|the heart
the human skeleton|the immune system|the metric system|the moon|the printing press|the water cycle
theater|tides|time management|time zones|tomatoes|tourism|toys|traffic|trains|travel|trees|turtles
vaccines|vegetables|violins|vitamins|volunteering|voting|walking|water|weather|whales|wheat|wine
winter|wolves|wood|yoga
"""

TASKS = """
What is {topic}?|Explain {topic} to a child.|Explain {topic} in simple words.
Why does {topic} matter?|Write a short story about {topic}.|Write a poem about {topic}.
Write three paragraphs on {topic}.|List five facts about {topic}.
Give me ten ideas that have to do with {topic}.|Name three problems with {topic}.
Write an email to a colleague about {topic}.|Write a letter to the editor on {topic}.
Write a blog post about {topic}.|Compare {topic} and {other}.
What do {topic} and {other} have in common?|Which is more important, {topic} or {other}?
How did people learn about {topic}?|What is the history of {topic}?
What would change without {topic}?|Write a dialogue between two friends about {topic}.
Describe {topic} to someone who has never heard of it.
What are common mistakes people make about {topic}?
Make a quiz with four questions about {topic}, with answers.|Write a news report on {topic}.
Plan a one-day workshop on {topic}.|Suggest a title and an outline for a book on {topic}.
You are a teacher. Introduce {topic} to your class.
You are a tour guide. Tell the visitors about {topic}.
Pretend to be an expert on {topic} and answer: what surprised you most?
Summarize what you know about {topic}.|What questions should I ask an expert on {topic}?
Write a product description that mentions {topic}.
Give advice to somebody who is interested in {topic}.|How does {topic} affect everyday life?
What are the advantages and disadvantages of {topic}?
Define {topic} in one sentence, then give an example.
"""

CODE_THINGS = """
reverses a list|counts the vowels in a string|checks whether a number is prime
finds the largest of three numbers|computes the factorial of a number
sorts a list of words by their length|merges two dictionaries|removes duplicates
computes the average of a list|finds the second smallest number|converts Celsius to Fahrenheit
reads a file line by line|counts words in a text|checks whether two words are anagrams
flattens a nested list|computes Fibonacci numbers|finds common elements of two lists
rotates a list by k places|validates an email address|parses a date
computes the sum of the digits of a number|prints a multiplication table|searches a sorted list
draws a triangle of stars|groups words by their first letter|converts a number to binary
computes the distance between two points|shuffles cards|transposes a matrix|multiplies two matrices
implements a stack|implements a queue|simulates dice rolls|splits a sentence|capitalizes each word
finds the longest word|finds missing numbers in a range|computes compound interest|writes a CSV file
"""

CODE_TASKS = """
Write a Python function that {thing}.|Write a JavaScript function that {thing}.
Write a program in C that {thing}.
Write a Python function that {thing}, with a docstring and a test.|Write a Java method that {thing}.
Explain how a function that {thing} works, step by step.
Write a Python class with a method that {thing}.
"""

FOLLOW_UPS = """
Summarize that in two sentences.|Can you give an example?|Explain that again in simpler words.
Why is that?|Make it shorter.|Rewrite your answer as a list.|Tell me more about the last point.
What should I read next?|Repeat the most important part.|Rewrite your answer in a formal tone.
Now write it as a dialogue.|Are you sure?|Which part is the hardest to understand?
Translate the first sentence into French.|Translate your answer into German.
Give me three questions about what you wrote.|What are the key words of your answer?
Turn it into a poem.
"""

NAMES = """
Anna|Ben|Carla|David|Emma|Felix|Grace|Henry|Iris|Jack|Kim|Leo|Maria|Nina|Oscar|Paul|Rosa|Sam|Tara
Victor
"""
ITEMS = "apples|books|coins|eggs|marbles|notebooks|oranges|pencils|shells|stamps|stickers|tickets"
LANGUAGES = ["French", "German", "Spanish", "Italian"]


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.replace("\n", "|").split("|") if entry.strip()]


_TOPICS, _TASKS, _FOLLOW_UPS = _entries(TOPICS), _entries(TASKS), _entries(FOLLOW_UPS)
_CODE_THINGS, _CODE_TASKS = _entries(CODE_THINGS), _entries(CODE_TASKS)
_NAMES, _ITEMS = _entries(NAMES), _entries(ITEMS)


def _about_topic(draw: random.Random) -> str:
    topic, other = draw.sample(_TOPICS, 2)
    return draw.choice(_TASKS).format(topic=topic, other=other)


def _code(draw: random.Random) -> str:
    return draw.choice(_CODE_TASKS).format(thing=draw.choice(_CODE_THINGS))


def _word_problem(draw: random.Random) -> str:
    (name, other), item = draw.sample(_NAMES, 2), draw.choice(_ITEMS)
    first, second, third = draw.randint(6, 60), draw.randint(2, 30), draw.randint(2, 9)
    return draw.choice(
        [
            (
                f"{name} has {first} {item} and gives {min(second, first)} of them to {other}. How "
                "many are left?"
            ),
            (
                f"{name} buys {third} boxes of {item} with {second} in each. How many {item} is "
                "that in total?"
            ),
            (
                f"A box of {item} costs {third} dollars. How much do {second} boxes cost? Show "
                "your work."
            ),
            (
                f"{name} has {first} {item}. {other} has {third} times as many. How many do they "
                "have together?"
            ),
            f"What is {first} plus {second}?",
            f"What is {first} times {third}? Explain each step.",
            f"If a train travels {first} miles in {third} hours, what is its average speed?",
        ]
    )


def _translation(draw: random.Random) -> str:
    name, topic, language = draw.choice(_NAMES), draw.choice(_TOPICS), draw.choice(LANGUAGES)
    sentence = draw.choice(
        [
            f"My friend {name} wrote a long letter about {topic}.",
            f"Yesterday we talked about {topic}, and {name} had a good question.",
            f"{name} will give a talk on {topic} next week.",
        ]
    )
    return draw.choice(
        [f"Translate into {language}: {sentence}", f"How do I say this in {language}? {sentence}"]
    )


def _extraction(draw: random.Random) -> str:
    rows = [
        f"{name}, {draw.randint(18, 80)} years old, likes {draw.choice(_TOPICS)} and owns "
        f"{draw.randint(2, 40)} {item}."
        for name, item in zip(draw.sample(_NAMES, 4), draw.sample(_ITEMS, 4), strict=True)
    ]
    question = draw.choice(
        [
            "Who is the oldest?",
            "Make a table of names and ages.",
            "Write the facts as JSON.",
            "Summarize the text.",
            "List the names in alphabetical order.",
            f"What does {rows[1].split(',')[0]} like?",
        ]
    )
    return draw.choice([f"{' '.join(rows)}\n\n{question}", f"{question}\n\n{' '.join(rows)}"])


KINDS: list[tuple[Callable[[random.Random], str], int]] = [
    (_about_topic, 10),
    (_code, 3),
    (_word_problem, 3),
    (_translation, 1),
    (_extraction, 2),
]
"""Sources of questions, with weights."""


def question(draw: random.Random) -> str:
    """Return a first user turn."""
    kinds, weights = zip(*KINDS, strict=True)
    return draw.choices(kinds, weights)[0](draw)


def next_turn(draw: random.Random) -> str:
    """Return a later user turn, which follows up on the answer half of the time."""
    return draw.choice(_FOLLOW_UPS) if draw.random() < 0.5 else question(draw)
