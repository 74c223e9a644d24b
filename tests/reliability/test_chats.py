"""Chats of random calls, whose cache goes from turn to turn, are those of plain `generate()`."""

from collections import Counter
from dataclasses import replace

import pytest
import transformers
from packaging.version import Version

from tests.random_calls import draw_case
from tests.random_search import run_case

FAMILIES = ("llama", "mistral_window", "gpt2")
# Before, plain decoding reads the whole text again behind a cache that holds it.
READS_IN_PIECES = Version(transformers.__version__) >= Version("5.21")


@pytest.mark.parametrize(
    "numbers", [*(range(at, at + 4) for at in (0, 4, 8)), pytest.param(range(12, 60), marks=pytest.mark.slow)]
)
def test_text_scores_and_cache_of_every_turn_are_those_of_plain(numbers):
    kinds: Counter[str] = Counter()
    for number in numbers:
        case = draw_case(7, number, FAMILIES)
        cache = "preallocated" if case.cache == "static" else case.cache
        chat = replace(case, num_turns=3, passed="with config", cache=cache, embeds=False, num_return_sequences=1)
        chat = chat if READS_IN_PIECES else replace(chat, prefill_chunk_size=0)
        result = run_case(chat)
        assert result.kind in ("equal", "refused", "both fail"), (chat, result)
        kinds[result.kind] += 1
    assert kinds["equal"] >= 0.7 * len(numbers)
