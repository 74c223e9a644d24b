"""Speculative decoding with rejection sampling, as a `custom_generate` function."""

import hf_speculate

# transformers copies this file alone and does not say where from, so the fields of ../generation_config.json stand
# here as well. What the call sets itself goes first.
FIELDS = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "verifier": "rejection",
}


def generate(model, **kwargs):
    """What `model.generate(**kwargs)` returns, decoded with `assistant_model` and rejection sampling."""
    return hf_speculate.generate(model, fields_from=FIELDS, **kwargs)
