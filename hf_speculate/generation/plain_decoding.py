"""Fall back to plain decoding if user code in the target may not work with speculation."""

import importlib
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from hf_speculate.cache.static import static_copies
from hf_speculate.compat import CACHE_NAMES, plain_decoding
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.call import Call
from hf_speculate.engine.outputs import GenerateOutput
from hf_speculate.errors import warn_user
from hf_speculate.generation.undrafted import seeded
from hf_speculate.models.foreign_code import described
from hf_speculate.models.quirks import is_tested_type
from hf_speculate.stats import SpeculationStats

_SELF_TEST = "hf_speculate.options.self_test.compare"  # imported for untested model types


def self_test(call: Call, source: DraftSource) -> str:
    """Compare an untested type of target with plain decoding; return "" for tested types."""
    if is_tested_type(call.target):
        return ""
    result: str = importlib.import_module(_SELF_TEST).check_decoding(call, source)
    return result


def plain_reason(call: Call, source: DraftSource, stats: SpeculationStats) -> str:
    """Return why user code in the target requires plain decoding, and warn about it.

    The result is empty if the call drafts.
    """
    choice = call.config.speculation_hooks
    if not source.drafts or choice == "trusted" or not call.ranks.max(int(bool(call.foreign_code))):
        return ""
    obstacle = 'speculation_hooks is "plain"'
    if choice == "check":
        obstacle = importlib.import_module(_SELF_TEST).foreign_code_obstacle(call, source)
    if not obstacle:
        return ""
    cause = described(call.foreign_code) or "hooks on another rank"
    reason = f"plain decoding, because of {cause}: {obstacle}"
    stats.add_fallback(reason)
    warn_user(reason)
    return reason


def decode_plainly(
    call: Call,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    stats: SpeculationStats,
) -> GenerateOutput | Tensor:
    """Decode in transformers' own loop with the call's own cache."""
    stats.plan = f"Plan(drafter: none; {stats.fallbacks[-1]})"
    options = {**call.model_kwargs, "streamer": call.streamer, "synced_gpus": call.ranks.is_synced}
    with seeded(call.config, call.prompts.input_ids.device, samples=call.do_sample):
        plain = logits_processor, stopping_criteria, call.generation_config
        output: Any = plain_decoding(call.target, call.prompts.input_ids, plain, **options)
    if call.static_cache is not None:
        static_copies().write_back(call.cache, call.static_cache)
    if isinstance(output, ModelOutput):
        cache = returned_cache(call)
        for name in CACHE_NAMES:
            if output.get(name) is not None:
                output[name] = cache
    return output  # type: ignore[no-any-return]


def returned_cache(call: Call) -> Cache:
    """Return the cache for the output, of the same kind as in plain `generate`."""
    if call.static_cache is not None:
        return call.static_cache
    if not call.is_static_named or not call.is_cache_kept:
        return call.cache
    num_columns = call.max_length + call.prompts.num_ahead - 1
    max_cache_len = max(num_columns, getattr(call.generation_config, "max_cache_len", None) or 0)
    config = call.target.config.get_text_config(decoder=True)
    copy: Cache = static_copies().static_copy(call.cache, config, max_cache_len)
    return copy
