"""Writes the model card of a repository that decodes speculatively."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

# A line of every card that is written here: it tells a card that may be replaced from one that a user wrote.
CARD_MARK = "<!-- hf_speculate.save_config wrote this card and replaces it; take this line out to keep the card. -->"


class _About(NamedTuple):
    """What a card says of a verifier."""

    title: str
    rule: str  # what makes a token stay
    arguments: str  # of the example
    expect: str
    source: str


_ABOUT = {
    "greedy": _About(
        "greedy decoding",
        "a token stays while it is the target's most likely one",
        "",
        "The text is that of plain greedy decoding: exactly in float64, and up to near-ties of the two "
        "largest logits in float32 and half precision, where a forward over several tokens may round "
        "differently from one over a single token. `do_sample=True` is refused; leave `verifier` out of the "
        "fields for both.",
        "Stern et al., *Blockwise Parallel Decoding*, arXiv:1811.03115.",
    ),
    "rejection": _About(
        "rejection sampling",
        "a token stays with the probability that keeps the target's law exact",
        "do_sample=True,",
        "Lossless: whatever the draft proposes, the text has the law of plain sampling from the target, after"
        " temperature, top-k, top-p and every other setting. With `do_sample=False` the text is that of "
        "greedy decoding.",
        "Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.",
    ),
    "block": _About(
        "block verification",
        "the longest prefix stays that keeps the target's law exact, all tokens of a round judged together",
        "do_sample=True,",
        "Lossless: the text has the law of plain sampling from the target, and on average at least as many "
        "tokens stay as with rejection sampling. With `do_sample=False` the text is that of greedy decoding.",
        "Sun et al., *Block Verification Accelerates Speculative Decoding*, arXiv:2403.10444.",
    ),
    "coupled": _About(
        "coupled sampling",
        "a token stays while it is the one that the target draws itself, from noise that both models share",
        "do_sample=True,\n    seed=1,",
        "Lossless, and repeatable: a seed gives the same text with every draft model and every number of "
        "drafted tokens, as far as the logits are equal. Somewhat fewer tokens stay than with rejection "
        "sampling. With `do_sample=False` the text is that of greedy decoding.",
        "Daliri et al., *Coupling without Communication and Drafter-Invariant Speculative Decoding*, arXiv:2408.07978.",
    ),
    "typical": _About(
        "typical acceptance",
        "a token stays while the target finds it likely enough for its own uncertainty",
        "do_sample=True,",
        "Typical acceptance is lossy: the text follows the draft wherever the target does not object, so its "
        "law is not the target's. Every drafted token that it keeps has a target probability above the smaller of "
        "`posterior_threshold` and `posterior_alpha` * exp(-H), where H is the entropy of the target's distribution at "
        "that position: where the target is uncertain, tokens below `posterior_threshold` stay too. With "
        "`do_sample=True` the token at the first refusal is drawn from the target's law, otherwise it is the "
        "target's most likely one.",
        "Cai et al., *Medusa*, arXiv:2401.10774, section 3.3.1.",
    ),
}
_DEFAULT = "rejection"  # what a card speaks of where no verifier is named

_MEANINGS = {
    "assistant_confidence_threshold": "a row stops drafting after a token of lower draft probability",
    "draft_sampling": "how the draft proposes under `do_sample=True`",
    "entropy_epsilon": "added inside the logarithm of the entropy",
    "max_matching_ngram_size": "tokens of the text's end that are matched at most",
    "num_assistant_tokens": "tokens drafted a round; with `adaptive` the most of them",
    "num_assistant_tokens_schedule": "how that number moves from round to round",
    "posterior_alpha": "the other bound is this times exp(-entropy) of the target's law",
    "posterior_threshold": "one bound of a token's probability, which must be above the smaller of two",
    "prompt_lookup_num_tokens": "tokens copied a round at most, from where the text's end stood before",
    "relax_only_inside": "ids of the tokens between which the verifier decides; outside, the lossless one does",
    "seed": "of the noise",
    "speculation_cache": "where key-value states are kept",
    "typical_correction": "the token at the first refusal",
    "verifier": "which drafted tokens stay",
    "verifier_backend": "the kernels that verify and draw",
}


def documented_verifiers() -> list[str]:
    """The verifiers that a card can explain, sorted."""
    return sorted(_ABOUT)


def title_of(verifier: str | None) -> str:
    """What a verifier is called in a sentence."""
    return _ABOUT[verifier or _DEFAULT].title


def is_replaceable(card: bytes) -> bool:
    """Whether a README was written by `model_card`, and not by a user, whose it stays."""
    return CARD_MARK.encode() in card.splitlines()


def model_card(fields: Mapping[str, Any], name: str) -> str:
    """The README of a repository.

    Args:
        fields: what the repository sets, by name.
        name: the folder, or the name on the Hub, that the example decodes with.
    """
    about = _ABOUT[fields.get("verifier") or _DEFAULT]
    rows = "\n".join(f"| `{field}` | `{json.dumps(fields[field])}` | {_MEANINGS[field]} |" for field in sorted(fields))
    what = _filled(
        "A `custom_generate` repository: it says how to decode. A small draft model proposes tokens, the target model "
        f"judges all of them in one forward, and {about.rule}. Works for one prompt and for left-padded batches."
    )
    extra = f"\n    {about.arguments}" if about.arguments else ""
    return f"""---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags:
  - custom_generate
  - speculative-decoding
  - assisted-generation
---

{CARD_MARK}

# Speculative decoding with {about.title}

{what}

## Use

Needs `hf-speculate` (see `custom_generate/requirements.txt`).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(target_name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(target_name)
draft = AutoModelForCausalLM.from_pretrained(draft_name)

inputs = tokenizer(["def fibonacci(n):"], return_tensors="pt")
output = model.generate(
    **inputs,
    custom_generate="{name}",  # this folder, or its name on the Hub
    trust_remote_code=True,
    assistant_model=draft,{extra}
    max_new_tokens=64,
)
```

## Fields

The call's own arguments go first; these fill in what it leaves open.

| field | here | meaning |
|---|---|---|
{rows}

They stand in `generation_config.json`, where `from_pretrained` finds them in a folder that holds weights too, and in
`custom_generate/generate.py`, which transformers runs by itself; change both.

## What to expect

{_filled(about.expect)}

Source: {about.source}
"""


def _filled(text: str) -> str:
    return textwrap.fill(text, width=120, break_long_words=False, break_on_hyphens=False)
