"""Makes the calls of transformers' own generation tests with enabled models: `python -m tests.transformers_mixin`.

transformers distributes its `GenerationTesterMixin` neither in its wheel nor in its source archive, so
`tests.mixin_calls` has the kinds of calls that it makes and `tests.random_search` does not draw. Each is made plainly
and with every source of drafts, and ids, scores, logits, hidden states, attentions and caches must be equal. Not
collected by pytest: it takes minutes.
"""

import argparse
import copy
import functools
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.errors import SpeculateError
from tests.mixin_calls import CALLS, EAGER_CALLS, WITHOUT_DRAFTS, DoesNotApply, Subject, first_row
from tests.random_calls import Case, prompts_of, target_of
from tests.random_search import TOLERANCES, compare
from tests.tiny import noisy_copy

FAMILIES = (
    *("llama", "llama4", "qwen2", "qwen3", "qwen2_moe", "mistral_window", "mixtral", "gemma2", "gemma3", "gemma4"),
    *("phi", "phi3", "gpt2", "gpt_neo", "gpt_neox", "gptj", "bloom", "mpt", "opt", "falcon", "cohere2", "gpt_oss"),
    *("t5", "bart", "mbart", "whisper", "image_sizes", "pixel_attention_mask", "second_per_grid_ts"),
)


@functools.cache
def models_of(family: str, attention: str) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """The family's model plain and enabled, with an attention implementation, and a noisy draft of it."""
    enabled = copy.deepcopy(target_of(family)[0])
    enabled.set_attn_implementation(attention)
    return hf_speculate.disable(copy.deepcopy(enabled)), enabled, noisy_copy(enabled, 0.05)


def sources_of(name: str, family: str, attention: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What an enabled model is given beside the call's own arguments."""
    _, enabled, draft = models_of(family, attention)
    yield "none", {}
    if name in WITHOUT_DRAFTS:
        return
    yield "model", {"assistant_model": draft, "num_assistant_tokens": 3}
    yield "itself", {"assistant_model": enabled, "num_assistant_tokens": 2}
    yield "lookup", {"prompt_lookup_num_tokens": 2}


def outcome(name: str, family: str, attention: str, sources: dict[str, Any]) -> tuple[str, str]:
    """What becomes of a call: its kind and, unless both outputs are equal, a detail."""
    plain, enabled, _ = models_of(family, attention)
    # what eager attention makes of padding depends on the empty columns of a static cache; no token reads it
    is_padded = not (attention == "eager" and "static" in name)
    inputs = prompts_of(Case(family, batch_size=2, padding="left" if is_padded else "none"))
    if "one_row" in name:
        inputs = first_row(inputs)
    call, error = CALLS[name], None
    try:
        expected = call(Subject(plain, copy.deepcopy(inputs), {}))  # transformers expands some in place
    except DoesNotApply:
        return "does not apply", ""
    except Exception as raised:  # noqa: BLE001  # then ours is to raise too
        error = raised
    try:
        got = call(Subject(enabled, copy.deepcopy(inputs), sources))
    except Exception as raised:  # noqa: BLE001
        detail = f"{type(raised).__name__}: {raised}"
        if error is not None:
            return "both raise", detail
        return ("refused" if isinstance(raised, SpeculateError) else "RAISES"), detail
    if error is not None:
        return "ONLY PLAIN RAISES", f"{type(error).__name__}: {error}"
    if isinstance(expected, Tensor):
        return ("equal", "") if torch.equal(expected, got) else ("DIFFERENT", "ids")
    if type(expected) is not type(got):
        return "DIFFERENT", f"{type(expected).__name__} and {type(got).__name__}"
    num_new = len(expected.logits)
    has_caches = expected.past_key_values is not None or got.past_key_values is not None
    lens = [num_new] * len(expected.logits[0])
    difference = compare(expected, got, lens, TOLERANCES[plain.dtype], has_caches)
    return ("DIFFERENT", difference) if difference else ("equal", "")


def main() -> int:
    """Make the calls that the command line names; 1 if one is different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", help="these families only")
    parser.add_argument("--call", action="append", choices=CALLS, help="these calls only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("hf_speculate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    counts: Counter[str] = Counter()
    for family in arguments.family or FAMILIES:
        has_sdpa = target_of(family)[0]._supports_sdpa
        for attention in ("sdpa", "eager") if has_sdpa else ("eager",):
            for call in arguments.call or (EAGER_CALLS if has_sdpa and attention == "eager" else CALLS):
                for source, options in sources_of(call, family, attention):
                    kind, detail = outcome(call, family, attention, options)
                    counts[kind] += 1
                    if kind == "does not apply":
                        break
                    if kind.isupper():
                        print(f"{kind}: {family} {attention} {call} {source}: {detail[:300]}", flush=True)
                    elif detail:
                        counts[f"{kind}: {call} {source}: {detail[:130]}"] += 1
        models_of.cache_clear()
        print(f"{family}: {counts['equal']} equal so far", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:6d} {name}")
    return int(any(kind.isupper() for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
