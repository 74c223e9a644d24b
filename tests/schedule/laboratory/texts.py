"""Read and make texts with proposals of prompt lookup and correct drafts at every position."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings

FOLDER = Path(__file__).parent
MAX_PROPOSED = 32
MIN_LEN = 9  # minimum number of tokens in a replayed text
PROMPT_LEN = 64  # prompt length of synthetic texts
COPYING = ("copying", "edit", "table", "translate", "summary", "refactor", "docstrings", "tests")


class Match(NamedTuple):
    """Proposal of prompt lookup at one position of a text."""

    match_len: int
    num_proposed: int
    num_right: int  # number of leading tokens that the text continues with


NO_MATCH = Match(0, 0, 0)


class Text(NamedTuple):
    """Text of a target, with the correct drafts at each position."""

    kind: str
    prompt_len: int
    num_tokens: int
    matches: Sequence[Match] = ()  # [N] proposals of prompt lookup
    rival_matches: Sequence[Match] = ()  # [N] proposals of transformers' prompt lookup
    # [N] numbers of tokens that a model or head guesses correctly from each position on
    runs: Sequence[int] = ()


def lookup_texts(
    path: Path = FOLDER / "lookup.json", kinds: str | tuple[str, ...] = ""
) -> list[Text]:
    """Return the recorded texts of given kinds, with the runs of a head if there are any.

    `kinds` are prefixes of their names.
    """
    return [text for text in _read_texts(path) if text.kind.startswith(kinds)]


@cache
def _read_texts(path: Path) -> list[Text]:
    data = json.loads(path.read_text())
    texts = [text for text in data["texts"] if len(text["text"]) >= MIN_LEN]
    return [
        Text(
            text["kind"],
            len(text["prompt"]),
            len(text["text"]),
            list(suffix_matches(text["prompt"], text["text"])),
            list(rival_matches(text["prompt"], text["text"])),
            text.get("runs", ()),
        )
        for text in texts
    ]


def suffix_matches(prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Match]:
    """Propose with the library's drafter at every position."""
    drafter = SuffixDrafter(SuffixSettings(max_draft_tokens=MAX_PROPOSED))
    drafter.begin(torch.tensor([prompt[:-1]]))
    for position, last in enumerate([prompt[-1], *tokens[:-1]]):
        drafter.look_up([[last]])
        match_len, proposed = drafter.texts[0].proposal
        yield Match(match_len, len(proposed), num_equal(proposed, tokens[position:]))


def rival_matches(prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Match]:
    """Propose as transformers does: the tokens after the first match of the last two or one."""
    ids: list[int] = []
    ends: dict[tuple[int, ...], int] = {}
    for position, token in enumerate([*prompt, *tokens]):
        if position >= len(prompt):
            match_len = next(
                (size for size in (2, 1) if ends.get(tuple(ids[-size:]), len(ids)) < len(ids)), 0
            )
            if match_len:
                end = ends[tuple(ids[-match_len:])]
                proposed = ids[end : end + MAX_PROPOSED]
                yield Match(
                    match_len, len(proposed), num_equal(proposed, tokens[position - len(prompt) :])
                )
            else:
                yield NO_MATCH
        ids.append(token)
        for size in (1, 2):
            if len(ids) >= size:
                ends.setdefault(tuple(ids[-size:]), len(ids))


def num_equal(proposed: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    pairs = enumerate(zip(proposed, tokens, strict=False))
    return next(
        (at for at, (guess, token) in pairs if guess != token), min(len(proposed), len(tokens))
    )


def model_texts(path: Path = FOLDER / "pair.json") -> list[Text]:
    """Return texts with correct drafts, recorded per token or as runs from every position."""
    data = json.loads(path.read_text())
    rows = data["texts"] if isinstance(data, dict) else data
    texts = [
        Text(
            row.get("kind", "pair"),
            row["prompt_len"] if "prompt_len" in row else len(row["prompt"]),
            len(row["right"] if "right" in row else row["runs"]),
            runs=runs_of([digit == "1" for digit in row["right"]])
            if "right" in row
            else row["runs"],
        )
        for row in rows
    ]
    return [text for text in texts if text.num_tokens >= MIN_LEN]


def runs_of(guesses: Sequence[bool]) -> list[int]:
    """Return the numbers [N] of consecutive tokens that a draft guesses from each position."""
    runs = accumulate(reversed(guesses), lambda run, guess: run + 1 if guess else 0, initial=0)
    return list(runs)[:0:-1]


def even_texts(rate: float, num: int = 24) -> list[Text]:
    """Return texts in which every token has the same probability of a correct guess."""
    return _random_texts(f"a={rate}", lambda _: rate, num)


def switching_texts(num: int = 24) -> list[Text]:
    """Return texts whose rate of correct guesses alternates between 0.9 and 0.1 every 40 tokens."""
    return _random_texts("switch", lambda position: 0.1 if position // 40 % 2 else 0.9, num)


def _random_texts(kind: str, rate_at: Callable[[int], float], num: int) -> list[Text]:
    generator, texts = random.Random(kind), []
    for _ in range(num):
        start = generator.randrange(80)
        guesses = [generator.random() < rate_at(start + position) for position in range(288)]
        texts.append(Text(kind, PROMPT_LEN, len(guesses), runs=runs_of(guesses)))
    return texts


def misleading_texts(num: int = 12) -> list[Text]:
    """Return texts for which lookup always finds a match, but never the correct token."""
    generator = random.Random("misleading")
    wrong = [
        [Match(generator.choice((1, 1, 2, 3, 6)), MAX_PROPOSED, 0) for _ in range(288)]
        for _ in range(num)
    ]
    return [Text("misleading", PROMPT_LEN, len(found), found, found) for found in wrong]
