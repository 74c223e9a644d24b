"""Speculative decoding with coupled sampling, as a `custom_generate` function."""

import hf_speculate

# transformers copies this file alone and does not say where from, so the fields of ../generation_config.json stand
# here as well. What the call sets itself goes first.
FIELDS = {
    "verifier": "coupled",
}


def generate(model, **kwargs):
    """What `model.generate(**kwargs)` returns, decoded with `assistant_model` and coupled sampling."""
    return hf_speculate.generate(model, fields_from=FIELDS, **kwargs)
