"""Writes the model card of a repository that decodes speculatively."""

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from hf_speculate.config import SpeculationConfig
from hf_speculate.verify.base import is_lossless

# A line of every card written here: it tells a card that may be replaced from one that a user wrote.
CARD_MARK = "<!-- hf_speculate.save_config wrote this card and replaces it; remove this line to keep your changes. -->"


class About(NamedTuple):
    title: str
    rule: str  # when a drafted token stays
    example: str  # arguments of the example call
    source: str


ABOUT = {
    "greedy": About(
        "greedy verification",
        "a drafted token stays if it is the target's most likely token",
        "",
        "Stern et al., *Blockwise Parallel Decoding*, arXiv:1811.03115.",
    ),
    "rejection": About(
        "rejection sampling",
        "a drafted token stays with probability min(1, p/q) under the target p and the draft q",
        "do_sample=True,",
        "Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.",
    ),
    "block": About(
        "block verification",
        "the tokens of a round are verified jointly, which on average keeps at least as many as rejection sampling",
        "do_sample=True,",
        "Sun et al., *Block Verification Accelerates Speculative Decoding*, arXiv:2403.10444.",
    ),
    "coupled": About(
        "coupled sampling",
        "a drafted token stays if the target samples the same one from noise that both models share, so a seed gives "
        "the same text with every draft model",
        "do_sample=True,\n    seed=1,",
        "Daliri et al., *Coupling without Communication and Drafter-Invariant Speculative Decoding*, arXiv:2408.07978.",
    ),
    "typical": About(
        "typical acceptance",
        "a drafted token stays if its probability under the target is above min(posterior_threshold, posterior_alpha * "
        "exp(-entropy))",
        "do_sample=True,",
        "Cai et al., *Medusa*, arXiv:2401.10774, section 3.3.1.",
    ),
}
DEFAULT = "rejection"  # described if no verifier is set


def model_card(fields: Mapping[str, Any], name: str) -> str:
    verifier = fields.get("verifier") or DEFAULT
    about = ABOUT[verifier]
    values = {"about": about, "name": name, "fields": sorted(fields.items()), "meanings": _meanings()}
    keeps = is_lossless(SpeculationConfig(verifier=verifier))
    return render("card.md.jinja", **values, mark=CARD_MARK, is_greedy=verifier == "greedy", is_lossless=keeps)


def render(template: str, **values: Any) -> str:
    """Fill in a template of this package."""
    environment = Environment(
        loader=PackageLoader("hf_speculate.tools.hub", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"json": json.dumps, "repr": repr}
    return environment.get_template(template).render(values)


def _meanings() -> dict[str, str]:
    """First sentence on each field in the docstring of `SpeculationConfig`."""
    arguments = (inspect.getdoc(SpeculationConfig) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.M)
    return {name: " ".join(text.split()).split(". ")[0].removesuffix(".") for name, text in entries}
