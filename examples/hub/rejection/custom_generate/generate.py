"""Speculative decoding with rejection sampling, as a `custom_generate` function."""

try:
    import hf_speculate
except ImportError as error:
    raise ImportError(
        "hf_speculate is not installed; run pip install . in a clone of its repository"
    ) from error

# transformers copies this file alone, so it repeats the fields of ../generation_config.json.
FIELDS = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "verifier": "rejection",
}


def generate(model, **kwargs):
    """Run `model.generate(**kwargs)` with `assistant_model` and rejection sampling."""
    return hf_speculate.generate(model, fields_from=FIELDS, **kwargs)
