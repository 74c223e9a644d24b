"""Says before anything large is loaded whether two models go together."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_speculate.compat import stateful_names
from hf_speculate.draft.assistant import MAX_PADDING
from hf_speculate.draft.vocab_intersection import intersect_vocabularies
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.generation.draft_source import ASSISTED
from hf_speculate.generation.validate_models import check_models
from hf_speculate.models.rope import growing_rope
from hf_speculate.tools.checks.gains import ACCEPTANCES, Gain, foretell_gains
from hf_speculate.tools.checks.sources import Described, ModelSource, describe

LEVELS = ("ok", "warning", "refused")


class Finding(NamedTuple):
    """One thing to know about a pair; `level` is one of `LEVELS`."""

    level: str
    text: str


class Overlap(NamedTuple):
    """How two tokenizers' vocabularies lie to one another.

    `num_shared` tokens of `num_target` are spelled alike in both, `num_same_id` of them under one id. `is_same` is
    true where the two hold the same tokens under the same ids.
    """

    num_target: int
    num_draft: int
    num_shared: int
    num_same_id: int

    @property
    def share(self) -> float:
        """Share of the target's tokens that the draft has too, in [0, 1]."""
        return self.num_shared / max(self.num_target, 1)

    @property
    def is_same(self) -> bool:
        """Whether an id means the same to both."""
        return self.num_target == self.num_draft == self.num_same_id


@dataclass(frozen=True)
class PairReport:
    """What `check_pair` found.

    Args:
        target, draft: names of the two models.
        level: "ok", "warning" or "refused", the worst of the findings.
        findings: what to know, in the order it was looked at.
        overlap: of the tokenizers; None: one was not found.
        target_params, draft_params: numbers of parameters.
        size_ratio: the parameter bytes that a draft step reads over those of a target's.
        gains: the cost model's best by acceptance; an upper bound.
    """

    target: str
    draft: str
    level: str
    findings: tuple[Finding, ...]
    overlap: Overlap | None
    target_params: int
    draft_params: int
    size_ratio: float
    gains: tuple[Gain, ...]

    @property
    def ok(self) -> bool:
        """Whether `generate()` takes the pair, perhaps with warnings."""
        return self.level != "refused"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        fields = asdict(self)
        fields["findings"] = [finding._asdict() for finding in self.findings]
        fields["gains"] = [gain._asdict() for gain in self.gains]
        fields["overlap"] = None if self.overlap is None else {**self.overlap._asdict(), "share": self.overlap.share}
        return fields

    def __str__(self) -> str:
        sizes = f"{_in_words(self.draft_params)} against {_in_words(self.target_params)} parameters"
        lines = [
            f"{self.level}: {self.draft} as a draft for {self.target}",
            f"  sizes: {sizes}; a draft step reads {self.size_ratio:.3f} of the bytes of a target's",
        ]
        if self.overlap is not None:
            lines.append(f"  tokenizers: {self.overlap.share:.1%} of the target's tokens are the draft's too")
        lines += [f"  {finding.level}: {finding.text}" for finding in self.findings]
        lines += ["  at most, by share of drafted tokens kept:", "    kept   best K   times plain speed"]
        lines += [f"    {one.acceptance:.1f}    {one.num_draft_tokens:>6}   {one.speedup:.2f}" for one in self.gains]
        return "\n".join(lines)


def check_pair(
    target: ModelSource,
    draft: ModelSource,
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
) -> PairReport:
    """Say whether `draft` can draft for `target`, and what that may gain.

    Configs and tokenizers are enough: models that are not passed as objects are laid out on the meta device, without
    weights, and nothing is fetched from the network. Refusals are those of `generate(assistant_model=draft)`.

    Args:
        target: a model, a config, or the name or path of one whose small files are on this machine.
        draft: the same of the draft model.
        target_tokenizer: the target's; None: looked for beside its config.
        draft_tokenizer: the draft's, likewise.

    Returns:
        A report that prints as text; `.ok` is False where `generate()` would refuse.

    Raises:
        ConfigError: a name has no config on this machine, or an argument is none of the above.
        UnsupportedModelError: transformers has no language model for a config.
    """
    pair = describe("target", target, target_tokenizer), describe("draft", draft, draft_tokenizer)
    overlap = None
    if pair[0].tokenizer is not None and pair[1].tokenizer is not None:
        overlap = vocabulary_overlap(pair[0].tokenizer, pair[1].tokenizer)
    findings = (*model_findings(*pair), *vocabulary_findings(*pair, overlap), *text_findings(*pair))
    findings = (*findings, *size_findings(*pair))
    gains = foretell_gains(pair[0].size, pair[1].size)
    findings = tuple(dict.fromkeys(findings))  # one refusal may be found for each model and for both
    return PairReport(
        target=pair[0].name,
        draft=pair[1].name,
        level=max((finding.level for finding in findings), key=LEVELS.index, default="ok"),
        findings=findings,
        overlap=overlap,
        target_params=pair[0].size.num_params,
        draft_params=pair[1].size.num_params,
        size_ratio=pair[1].size.num_read_bytes() / pair[0].size.num_read_bytes(),
        gains=gains,
    )


def vocabulary_overlap(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Overlap:
    """Count the tokens that two tokenizers spell alike.

    Args:
        target: whose vocabulary is to be covered.
        draft: the other.
    """
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    shared = target_ids.keys() & draft_ids.keys()
    num_same_id = sum(target_ids[token] == draft_ids[token] for token in shared)
    return Overlap(len(target_ids), len(draft_ids), len(shared), num_same_id)


def model_findings(target: Described, draft: Described) -> list[Finding]:
    """What `generate()` refuses, and what it refuses for long texts only."""
    found = []
    for models in ([target.model], [draft.model], [target.model, draft.model]):
        try:
            check_models(models, stateful_names(models), ASSISTED)
        except UnsupportedModelError as error:
            found.append(Finding("refused", str(error)))
    if not draft.model.can_generate():
        found.append(Finding("refused", f"assistant_model must be able to generate, got {type(draft.model).__name__}"))
    rope = growing_rope(target.model)
    if rope is not None:
        text = f"texts of more than {rope[1]} tokens are refused, for the target's {rope[0]} rotary embeddings"
        found.append(Finding("warning", text))
    lens = [getattr(one.config, "max_position_embeddings", None) or 0 for one in (target, draft)]
    if 0 < lens[1] < lens[0]:
        text = (
            f"the draft serves texts of {lens[1]} tokens, the target of {lens[0]}: past the former few drafts are kept"
        )
        found.append(Finding("warning", text))
    return found


def vocabulary_findings(target: Described, draft: Described, overlap: Overlap | None) -> list[Finding]:
    """What follows from tokenizers and from the sizes of the models' tables."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    if overlap is None:
        return _findings_without_tokenizers(target, draft, sizes)
    if not overlap.is_same and target.tokenizer is not None and draft.tokenizer is not None:
        try:
            vocabulary = intersect_vocabularies(target.tokenizer, draft.tokenizer, *sizes)
        except UnsupportedModelError as error:
            return [Finding("refused", str(error))]
        text = (
            f"another tokenizer: {int(vocabulary.is_shared.sum())} of the target's {overlap.num_target} tokens can be "
            "drafted; pass tokenizer= and assistant_tokenizer= to generate()"
        )
        return [Finding("warning", text)]
    if sizes[0] != sizes[1]:
        return [Finding("warning", f"one tokenizer, but tables padded to {sizes[0]} and {sizes[1]} tokens")]
    return []


def _findings_without_tokenizers(target: Described, draft: Described, sizes: tuple[int, int]) -> list[Finding]:
    missing = " and ".join(one.role for one in (target, draft) if one.tokenizer is None)
    unknown = f"no tokenizer was found for {missing}: whether ids mean the same is unknown"
    if sizes[0] == sizes[1]:
        return [Finding("warning", unknown)]
    if abs(sizes[0] - sizes[1]) <= MAX_PADDING and target.eos_token_ids == draft.eos_token_ids:
        return [Finding("warning", f"{unknown}; tables of {sizes[0]} and {sizes[1]} tokens count as padding")]
    text = f"{unknown}, and tables of {sizes[0]} and {sizes[1]} tokens are no padding; pass both tokenizers"
    return [Finding("refused", text)]


def text_findings(target: Described, draft: Described) -> list[Finding]:
    """What makes the two models continue one text differently."""
    found = []
    if target.eos_token_ids != draft.eos_token_ids:
        ids = [", ".join(map(str, sorted(one.eos_token_ids))) or "none" for one in (target, draft)]
        text = f"EOS ids differ: {ids[0]} and, in the draft, {ids[1]}; the target's end the text"
        found.append(Finding("warning", text))
    templates = [getattr(one.tokenizer, "chat_template", None) for one in (target, draft)]
    if target.tokenizer is not None and draft.tokenizer is not None and templates[0] != templates[1]:
        text = "chat templates differ: prompts follow the target's, for which the draft may not be trained"
        found.append(Finding("warning", text))
    return found


def size_findings(target: Described, draft: Described) -> list[Finding]:
    """What speaks against the pair in how much its models read."""
    found = []
    for one in (target, draft):
        if one.quantisation:
            text = (
                f"the {one.role} is quantised ({one.quantisation}): its kernels may cost more than its bytes say, and "
                "a forward over several tokens may round otherwise than one over a single token"
            )
            found.append(Finding("warning", text))
    if target.size.num_experts > 1:
        text = (
            f"the target routes each token to {target.size.num_chosen} of {target.size.num_experts} experts: verifying "
            "several tokens reads more of them, which the gains below count"
        )
        found.append(Finding("warning", text))
    if draft.size.num_bytes >= target.size.num_bytes:
        text = "the draft has as many bytes as the target: the adaptive schedule never calls it"
        found.append(Finding("warning", text))
    elif all(gain.num_draft_tokens == 0 for gain in foretell_gains(target.size, draft.size)):
        text = f"the draft is too large to gain anything while at most {max(ACCEPTANCES):.0%} of its tokens are kept"
        found.append(Finding("warning", text))
    return found


def _in_words(num_params: int) -> str:
    return f"{num_params / 1e9:.2f} B" if num_params >= 1e9 else f"{num_params / 1e6:.2f} M"
