"""Speculative decoding with coupled sampling, as a `custom_generate` function."""

try:
    import hf_speculate
except ImportError as error:
    raise ImportError(
        "hf_speculate is not installed; run pip install . in a clone of its repository"
    ) from error

# transformers copies this file alone, so it repeats the fields of ../generation_config.json.
FIELDS = {
    "verifier": "coupled",
}


def generate(model, **kwargs):
    """Run `model.generate(**kwargs)` with `assistant_model` and coupled sampling."""
    return hf_speculate.generate(model, fields_from=FIELDS, **kwargs)
