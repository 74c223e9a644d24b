"""The file for `--store`, whose outputs of earlier runs are a further source for prompt lookup."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_speculate.options.sources.suffix_store import SuffixStore
from hf_speculate.tools.cli.console import note
from hf_speculate.tools.cli.loading import load_tokenizer
from hf_speculate.tools.cli.options import StoredModels

_LOOKUP_TOKENS = 10  # number of tokens to copy with `--store` but without `--lookup`
_BYTES_PER_TOKEN = 640  # twice the maximum per token, because a store drops its older half at once


@contextmanager
def open_store(options: StoredModels, is_main: bool = True) -> Iterator[dict[str, Any]]:
    """Read the store of a command; yield arguments of `generate()`.

    At the end, even after an error, the main process writes the store.
    """
    if options.store is None:
        yield {}
        return
    max_tokens = options.store_tokens
    max_bytes = max(max_tokens * _BYTES_PER_TOKEN, 1 << 20)
    tokenizer = load_tokenizer(options)
    if options.store.exists():
        store = SuffixStore.load(
            options.store, tokenizer, max_tokens=max_tokens, max_bytes=max_bytes
        )
    else:
        store = SuffixStore(max_bytes, max_tokens=max_tokens, tokenizer=tokenizer)
    num_added = store.num_added
    try:
        yield {"suffix_store": store}
    finally:
        if is_main and store.num_added > num_added:
            store.save(options.store)
            note(f"{store.num_tokens} tokens of earlier outputs in {options.store}")


def lookup_of(options: StoredModels) -> dict[str, Any]:
    """Return a default for prompt lookup if `--store` is given without `--lookup`."""
    is_default = options.store is not None and options.lookup is None
    return {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if is_default else {}
