"""Compare random calls of tiny models with plain `generate()`.

    python -m tests.random_search --seed 1 --num 2000

Ids, scores, logits, hidden states, attentions and the returned cache must be equal. A failing case
is shrunk and printed as a `Case` for `--case`. pytest does not collect this file, because a run
takes minutes to hours.
"""

import argparse
import contextlib
import copy
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import EncoderDecoderCache

from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import (
    ConfigError,
    SpeculateError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from hf_speculate.models.language_model import vocab_size_of
from tests.compatibility_rows import StopAtSum
from tests.random_calls import (
    FAMILY_NAMES,
    LARGEST_PROMPT_ID,
    Case,
    cache_of,
    draft_options,
    draw_case,
    options_of,
    prompts_of,
    target_of,
)

# some families compute softmax in float32 for every dtype
TOLERANCES = {torch.float64: 1e-4, torch.float32: 2e-3}
# Only recurrent models raise these errors, because transformers cannot read their prompts in
# chunks.
_OF_TRANSFORMERS = ("prefill chunking without a cache", "can only be called on Attention layers")


class Result(NamedTuple):
    outcome: str  # "equal", "tie", "refused", "both fail", "plain fails" or "different"
    detail: str = ""
    num_accepted: int = 0  # accepted draft tokens over all turns, if the outputs are equal
    num_rejected: int = 0
    fallbacks: tuple[str, ...] = ()  # reasons for fallbacks, if the outputs are equal


def run_case(case: Case) -> Result:
    """Run a case without and with a draft, and compare the results."""
    model, _ = target_of(case.family)
    own, caches = draft_options(case), [cache_of(case), cache_of(case)]  # the same in all turns
    inputs = prompts_of(case)
    eos: list[int] = []
    num_accepted = num_verified = 0
    fallbacks: list[str] = []
    for turn in range(case.num_turns):
        ours = partial(_decode, case, own, inputs, eos, caches[1])
        try:
            eos += [] if eos else eos_ids(case, inputs)
            expected = _decode(case, {}, inputs, eos, caches[0])
        except Exception as error:  # noqa: BLE001  # an error of plain decoding must also be ours
            return _both_fail(ours, error)
        try:
            got = ours()
        except (ConfigError, UnsupportedGenerationError, UnsupportedModelError) as error:
            return Result("refused", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  # counts as a difference
            return Result("different", f"turn {turn}: {type(error).__name__}: {error}")
        num_prompt = expected.sequences.shape[1] - len(expected.logits)
        lens = _live_lens(case, expected.sequences, num_prompt, eos)
        difference = compare(expected, got, lens, TOLERANCES[model.dtype], case.cache != "static")
        if difference:
            return Result(
                "tie" if _is_tie(expected, got) else "different", f"turn {turn}: {difference}"
            )
        num_accepted += got.speculation.num_accepted
        num_verified += got.speculation.num_verified
        fallbacks += got.speculation.fallbacks
        if (
            "input_ids" not in inputs
            or model.config.is_encoder_decoder
            or case.num_return_sequences > 1
        ):
            break
        inputs = _longer(inputs, expected.sequences, vocab_size_of(model))
    return Result(
        "equal", "", num_accepted, num_verified - num_accepted, tuple(dict.fromkeys(fallbacks))
    )


def _decode(
    case: Case, own: dict[str, Any], inputs: dict[str, Any], eos: list[int], cache: Any
) -> Any:
    model, options = target_of(case.family)[0], options_of(case, eos) | own
    if model.config.is_encoder_decoder:
        options.pop("prefill_chunk_size", None)  # plain decoding also crops the encoder's mask
    if cache is not None:
        options[CACHE_NAME] = cache
    torch.manual_seed(0)  # some multimodal models draw noise
    return model.generate(**copy.deepcopy(inputs), **options)  # some are expanded in place


def _both_fail(ours: Callable[[], Any], error: Exception) -> Result:
    try:
        ours()
    except Exception:  # noqa: BLE001  # same as plain decoding
        return Result("both fail", f"{type(error).__name__}: {error}")
    is_theirs = any(words in str(error) for words in _OF_TRANSFORMERS)
    is_check = isinstance(error, SpeculateError | ValueError) and not is_theirs
    return Result("different" if is_check else "plain fails", f"{type(error).__name__}: {error}")


def eos_ids(case: Case, inputs: dict[str, Any]) -> list[int]:
    """Return EOS ids that end the text of the case at the chosen positions."""
    if not case.ends:
        return []
    model, _ = target_of(case.family)
    text = model.generate(**copy.deepcopy(inputs), max_new_tokens=16)[0, -16:].tolist()
    return sorted({text[min(end, len(text) - 1)] for end in case.ends})


def _longer(inputs: dict[str, Any], sequences: Tensor, vocab_size: int) -> dict[str, Any]:
    """Return the prompt of the next turn: the text so far and two more tokens."""
    num_new = sequences.shape[1] - inputs["input_ids"].shape[1]
    more = (sequences[:, -1:] + torch.tensor([[1, 2]])) % min(LARGEST_PROMPT_ID, vocab_size)
    mask = inputs["attention_mask"]
    return {
        "input_ids": torch.cat([sequences, more], dim=1),
        "attention_mask": torch.cat([mask, mask.new_ones(len(mask), num_new + 2)], dim=1),
    }


def _live_lens(case: Case, sequences: Tensor, num_prompt: int, eos: list[int]) -> list[int]:
    """Count the new tokens of each row up to and including its EOS."""
    own_eos = target_of(case.family)[0].generation_config.eos_token_id  # for Whisper
    eos = eos or ([] if own_eos is None else [own_eos])
    positions = range(num_prompt, sequences.shape[1])
    is_end = torch.isin(sequences[:, num_prompt:], torch.tensor(eos))
    if eos and case.own_criterion:
        ends = [StopAtSum()(sequences[:, : position + 1], None) for position in positions]
        is_end = is_end | torch.stack(ends, dim=1)
    return [int(row.int().argmax()) + 1 if row.any() else len(row) for row in is_end]


def compare(plain: Any, ours: Any, lens: list[int], tolerance: float, has_caches: bool) -> str:
    """Describe the difference, or return an empty string.

    The logits of each row are compared only for its first `lens` [B] new tokens.
    """
    expected, actual = (_tensors(output, lens, has_caches) for output in (plain, ours))
    if expected.keys() != actual.keys():
        return f"one only has {sorted(expected.keys() ^ actual.keys())[:2]}"
    for name, tensor in expected.items():
        if not _is_close(tensor, actual[name], tolerance):
            return name
    return ""


def _is_close(one: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    limits = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), **limits)


def _tensors(output: Any, lens: list[int], has_caches: bool) -> dict[str, Tensor]:
    """Return the outputs of a call by name."""
    tensors = {"sequences": output.sequences}
    for name in ("scores", "logits"):
        for step, tensor in enumerate(getattr(output, name) or ()):
            tensors[f"{name} of step {step}"] = tensor[
                [row for row, length in enumerate(lens) if step < length]
            ]
    for name in ("hidden_states", "attentions", "decoder_hidden_states", "encoder_hidden_states"):
        tensors |= {
            f"{name}, tensor {number}": tensor
            for number, tensor in enumerate(tree_leaves(getattr(output, name, None)))
        }
    cache = output.get(CACHE_NAME) if has_caches else None
    parts = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if type(cache) is EncoderDecoderCache
        else (cache,)
    )
    for number, part in enumerate(parts):
        for place, layer in enumerate(getattr(part, "layers", ())):
            owner = f"layer {place} of a {type(part).__name__} ({number})"
            tensors |= {
                f"{name} of {owner}": getattr(layer, name, None) for name in ("keys", "values")
            }
    return tensors


def _is_tie(plain: Any, ours: Any) -> bool:
    """Return True if plain decoding had a float32 tie at the first different token."""
    num = min(plain.sequences.shape[1], ours.sequences.shape[1])
    differing = (plain.sequences[:, :num] != ours.sequences[:, :num]).T.nonzero().tolist()
    if not differing:
        return False
    position, row = differing[0]
    best = plain.logits[position - plain.sequences.shape[1] + len(plain.logits)][row].topk(2).values
    return bool(best[0] - best[1] < 1e-5)


def shrunk(case: Case, detail: str) -> Case:
    """Return a simpler case with the same kind of difference."""
    for simpler in case.simpler():
        with contextlib.suppress(Exception):
            result = run_case(simpler)
            if result.outcome == "different" and result.detail[:16] == detail[:16]:
                return shrunk(simpler, detail)
    return case


def search(
    seed: int, numbers: range, families: tuple[str, ...], faults: tuple[str, ...] = ()
) -> Counter[str]:
    """Run the numbered cases, print those that differ, and count the cases of each kind."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(KeyboardInterrupt):  # keep the counts so far
        for index in numbers:
            case = draw_case(seed, index, families, faults)
            result = run_case(case)
            counts[result.outcome] += 1
            if result.outcome in ("different", "tie"):
                small = shrunk(case, result.detail) if result.outcome == "different" else case
                print(
                    f'{seed}:{index} {result.outcome}: {result.detail[:300]}\n  --case "{small}"',
                    flush=True,
                )
            elif result.outcome != "equal":
                counts[f"{result.outcome}: {result.detail[:110]}"] += 1
            if faults:
                counts[f"with {case.fault}: drafts ended"] += any(
                    "drafter" in reason for reason in result.fallbacks
                )
                counts[f"with {case.fault}: tokens accepted"] += result.num_accepted
    return counts


def main(faults: tuple[str, ...] = ()) -> int:
    """Run the cases given on the command line; return 1 if any of them differs."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=200, help="cases")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--family", action="append", choices=FAMILY_NAMES, help="these families only"
    )
    parser.add_argument("--case", help="one case as it was printed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("hf_speculate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if arguments.case:
        print(run_case(eval(arguments.case, {"Case": Case})))
        return 0
    families, began = tuple(arguments.family or FAMILY_NAMES), time.perf_counter()
    numbers = range(arguments.start, arguments.start + arguments.num)
    counts = search(arguments.seed, numbers, families, faults)
    print(f"seed {arguments.seed}, {len(families)} families, {time.perf_counter() - began:.0f} s")
    for outcome, count in sorted(counts.items()):
        print(f"{count:6d} {outcome}")
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
