"""Check fields of `GenerationConfig` in `--set`; transformers detects errors late or never."""

import math
from typing import Any

from transformers import GenerationConfig

from hf_speculate.errors import ConfigError
from hf_speculate.field_checks import Check, integer, is_int, is_list, real
from hf_speculate.tools.dataset.rows import ROW_SETTINGS


def _is_ids(value: Any) -> bool:
    return is_list(value, is_int) and len(value) > 0


def _is_decay(value: Any) -> bool:
    return is_list(value, lambda number: isinstance(number, int | float)) and len(value) == 2


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_ids(value[0])
        and isinstance(value[1], int | float)
    )


_HINT = "leave it out for the default"
_COUNT = integer("an int of at least 0", 0, math.inf, _HINT)
_REAL = real("a number", lambda value: not math.isnan(value))
_FLAG = Check("be true or false", lambda value: isinstance(value, bool), _HINT)
_TEXT = Check("be a string", lambda value: isinstance(value, str), _HINT)
_IDS = Check(
    "be a token id or a list of them", lambda value: is_int(value) or is_list(value, is_int), _HINT
)
_NAMES = {
    _COUNT: """
        encoder_no_repeat_ngram_size max_cache_len max_length min_length min_new_tokens
        prefill_chunk_size""",
    _REAL: """
        encoder_repetition_penalty epsilon_cutoff eta_cutoff guidance_scale length_penalty max_time
        top_h""",
    _FLAG: """
        disable_compile is_assistant remove_invalid_values renormalize_logits token_healing
        use_cache use_mtp""",
    _TEXT: "cache_implementation",
    _IDS: """
        begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id
        forced_eos_token_id pad_token_id suppress_tokens""",
}
_CHECKS = {name: check for check, names in _NAMES.items() for name in names.split()}
_CHECKS |= {name: check._replace(hint=_HINT) for name, check in ROW_SETTINGS.items()}
_CHECKS |= {
    "bad_words_ids": Check(
        "be a list of lists of token ids", lambda value: is_list(value, _is_ids), _HINT
    ),
    "exponential_decay_length_penalty": Check(
        "be a number of tokens and a factor", _is_decay, _HINT
    ),
    "min_p": real("in [0, 1]", lambda value: 0 <= value <= 1),
    "num_beams": Check(
        "be 1", lambda value: value == 1, "beam search cannot be decoded speculatively"
    ),
    "sequence_bias": Check(
        "be a list of pairs, ids and a bias", lambda value: is_list(value, _is_bias), _HINT
    ),
}


def check_fields(options: dict[str, Any]) -> None:
    """Check the values of fields; None means the default."""
    set_options = {name: value for name, value in options.items() if value is not None}
    for name, value in set_options.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)
    try:
        # Without `do_sample`, settings for sampling would trigger a warning.
        GenerationConfig(**set_options, do_sample=True).validate()
    except (AttributeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            f"--set must name values that transformers takes, got {', '.join(set_options)}: "
            f"{message}"
        ) from error
