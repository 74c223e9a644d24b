"""Check whether a draft model fits a target, before weights are loaded."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

from rich.filesize import decimal
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.draft.assistant_model import AssistantModel, variant_of
from hf_speculate.draft.vocab_intersection import intersect_vocabularies
from hf_speculate.draft.vocab_mapping import MAX_PADDING
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.generation.validate_models import check_models
from hf_speculate.models.context import context_of, encoder_context_len
from hf_speculate.models.quirks import growing_rope
from hf_speculate.models.recurrent_layers import recurrent_cache
from hf_speculate.options.gemma4.assistant import Gemma4Assistant
from hf_speculate.options.recurrent.mixers import stepped_model
from hf_speculate.tools.checks.cost_model import ACCEPTANCE_PROBABILITIES, Gain, estimate_gains
from hf_speculate.tools.checks.sources import Described, ModelSource, describe

LEVELS = ("ok", "warning", "does not fit", "not supported")


@dataclass(frozen=True)
class Finding:
    """A finding about a pair."""

    #: one of `LEVELS`: "does not fit" if another draft may fit the target, "not supported" if one
    #: of the two models is not supported in any pair
    level: str
    text: str  #: the fact in words


_warning = partial(Finding, "warning")


@dataclass(frozen=True)
class Overlap:
    """The overlap between two tokenizers' vocabularies."""

    num_target: int  #: number of the target's tokens
    num_draft: int  #: number of the draft's tokens
    num_shared: int  #: number of tokens with the same spelling in both
    num_same_id: int  #: number of shared tokens with the same id in both

    @property
    def share(self) -> float:
        """Share of the target's tokens that are in the draft's vocabulary, in [0, 1]."""
        return self.num_shared / max(self.num_target, 1)

    @property
    def is_same(self) -> bool:
        """Whether both contain the same tokens with the same ids."""
        return self.num_target == self.num_draft == self.num_same_id


@dataclass(frozen=True)
class Memory:
    """An estimate of a model's memory."""

    dtype: str  #: dtype of the weights, without "torch."
    weight_bytes: int  #: size of all weights
    kv_bytes_per_token: int  #: size of the KV cache per token of each row

    def __str__(self) -> str:
        text = f"{decimal(self.weight_bytes)} in {self.dtype}"
        if not self.kv_bytes_per_token:
            return text
        return f"{text}, KV cache {decimal(1024 * self.kv_bytes_per_token)} per row of 1,024 tokens"


@dataclass(frozen=True)
class PairReport:
    """The result of `check_pair`; `print` shows it as text."""

    target: str  #: name of the target
    draft: str  #: name of the draft
    level: str  #: "ok", "warning", "does not fit" or "not supported", the worst of the findings
    findings: tuple[Finding, ...]  #: facts about the pair
    overlap: Overlap | None  #: overlap of the tokenizers; None if one was not found
    target_params: int  #: number of the target's parameters
    draft_params: int  #: number of the draft's parameters
    size_ratio: float  #: bytes read by a draft step over bytes read by a target step
    gains: tuple[Gain, ...]  #: estimates of the speed-up by verified acceptance rate
    target_memory: Memory  #: estimate for loading and running the target
    draft_memory: Memory  #: estimate for loading and running the draft

    @property
    def ok(self) -> bool:
        """Whether `generate()` accepts the pair, perhaps with warnings."""
        return self.level in ("ok", "warning")

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON-serialisable values."""
        overlap = (
            None if self.overlap is None else {**asdict(self.overlap), "share": self.overlap.share}
        )
        return asdict(self) | {"overlap": overlap}

    def __str__(self) -> str:
        models = [
            ("target", self.target_params, self.target_memory),
            ("draft", self.draft_params, self.draft_memory),
        ]
        lines = [f"{self.level}: {self.draft} as a draft for {self.target}"]
        lines += [parameter_line(role, num, memory) for role, num, memory in models]
        lines.append(
            f"  a draft step reads {self.size_ratio:.3f} of the bytes that a target step reads"
        )
        if self.overlap is not None:
            lines.append(
                f"  tokenizers: the draft has {self.overlap.share:.1%} of the target's tokens"
            )
        lines += [f"  {finding.level}: {finding.text}" for finding in self.findings]
        lines.append("  estimated speed-up over plain decoding:")
        lines.append("    verified acceptance rate   best K   speed-up")
        lines += [
            f"    {gain.acceptance_probability:>24.1f}   {gain.num_draft_tokens:>6}   "
            f"{gain.speedup:>7.2f}x"
            for gain in self.gains
        ]
        return "\n".join(lines)


def parameter_line(role: str, num_params: int, memory: Memory) -> str:
    count = f"{num_params / 1e9:.2f} B" if num_params >= 1e9 else f"{num_params / 1e6:.2f} M"
    return f"  {role}: {count} parameters, {memory}"


def worst_level(findings: Iterable[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def check_pair(
    target: ModelSource,
    draft: ModelSource,
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    draft_revision: str | None = None,
    **options: Any,
) -> PairReport:
    """Check whether `draft` can draft for `target`, and estimate memory and speed-up.

    Only configs and tokenizers are read, never weights. A config, name or path becomes a model on
    the meta device. `generate(assistant_model=draft)` raises errors for the same reasons.

    Args:
        target: a model, a config, or the name or path of a model.
        draft: the draft model, given in the same way.
        target_tokenizer: tokenizer of the target. None loads the tokenizer next to the config.
        draft_tokenizer: tokenizer of the draft, as above.
        dtype: dtype of the weights after loading, for example "float32". None uses the dtype in
            each config.
        draft_revision: branch, tag or commit of the draft on the Hub. None uses its main branch.
        **options: options of `from_pretrained`: `local_files_only`, `revision` (of the target),
            `trust_remote_code`.

    Returns:
        A printable report, whose `.ok` is False if `generate()` would reject the pair.

    Raises:
        ConfigError: a model has no config, or an argument is none of the above.
        UnsupportedModelError: transformers has no language model for a config.
    """
    of_target = describe("target", target, target_tokenizer, dtype, options)
    draft_options = {name: value for name, value in options.items() if name != "revision"}
    if draft_revision is not None:
        draft_options["revision"] = draft_revision
    of_draft = describe("draft", draft, draft_tokenizer, dtype, draft_options)
    # the draft uses the target's KV states and tokenizer
    reads_target = variant_of(of_draft.model) is not None
    if reads_target:
        size = of_draft.size._replace(kv_bytes_per_token=0)
        of_draft = of_draft._replace(
            tokenizer=of_target.tokenizer, eos_token_ids=of_target.eos_token_ids, size=size
        )
    overlap = None
    if of_target.tokenizer is not None and of_draft.tokenizer is not None:
        overlap = vocabulary_overlap(of_target.tokenizer, of_draft.tokenizer)
    all_findings = chain(
        (assistant_findings if reads_target else model_findings)(of_target, of_draft),
        vocabulary_findings(of_target, of_draft, overlap),
        text_findings(of_target, of_draft),
        size_findings(of_target, of_draft),
    )
    findings = tuple(dict.fromkeys(all_findings))  # both models may have the same finding
    return PairReport(
        target=of_target.name,
        draft=of_draft.name,
        level=worst_level(findings),
        findings=findings,
        overlap=overlap,
        target_params=of_target.size.num_params,
        draft_params=of_draft.size.num_params,
        size_ratio=of_draft.size.num_read_bytes() / of_target.size.num_read_bytes(),
        gains=estimate_gains(of_target.size, of_draft.size),
        target_memory=Memory(
            of_target.dtype, of_target.size.num_bytes, of_target.size.kv_bytes_per_token
        ),
        draft_memory=Memory(
            of_draft.dtype, of_draft.size.num_bytes, of_draft.size.kv_bytes_per_token
        ),
    )


def assistant_findings(target: Described, assistant: Described) -> Iterator[Finding]:
    """Yield the reason if a Gemma 4 assistant cannot draft for a target."""
    if text := unsupported(target.model):
        yield Finding("not supported", text)
        return
    try:
        Gemma4Assistant(assistant.model).check_target(target.model)
    except UnsupportedModelError as error:
        yield Finding("does not fit", str(error))


def vocabulary_overlap(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Overlap:
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    shared = target_ids.keys() & draft_ids.keys()
    num_same_id = sum(target_ids[token] == draft_ids[token] for token in shared)
    return Overlap(len(target_ids), len(draft_ids), len(shared), num_same_id)


def model_findings(target: Described, draft: Described) -> Iterator[Finding]:
    """Yield findings on models that `generate()` does not support, or not for long sequences."""
    alone = [unsupported(described.model) for described in (target, draft)]
    yield from (Finding("not supported", text) for text in alone if text)
    if not any(alone) and (text := unsupported(target.model, draft.model)):
        yield Finding("does not fit", text)
    if not draft.model.can_generate():
        yield Finding(
            "not supported",
            f"assistant_model must be able to generate, got {type(draft.model).__name__}",
        )
    for described in (target, draft):
        yield from recurrent_findings(described)
    yield from rope_findings(target)
    contexts = [context_of(target.model), context_of(draft.model)]
    lens = [math.inf if context is None else context.num_tokens for context in contexts]
    if lens[1] < lens[0]:
        of_target = "has no bound" if contexts[0] is None else f"is {lens[0]}"
        how = ", padding included" if contexts[1] is not None and contexts[1].counts_padding else ""
        yield _warning(
            f"the draft's context is {lens[1]} tokens{how}, and the target's {of_target}: longer "
            "rows decode plainly"
        )
    longest = (
        encoder_context_len(draft.model.config) if draft.model.config.is_encoder_decoder else None
    )
    if longest is not None and longest < (encoder_context_len(target.model.config) or math.inf):
        yield _warning(
            f"the draft's encoder reads {longest} tokens at most: longer texts are decoded plainly"
        )


def recurrent_findings(described: Described) -> Iterator[Finding]:
    cache = recurrent_cache(described.model)
    stepped = None if cache is None else stepped_model(described.model, cache)
    if stepped is not None and not stepped.obstacle:
        size = f"{stepped.num_bytes / 2**20:.3g} MiB a row, for each token of a round"
        yield Finding(
            "ok",
            f"the {described.role} has recurrent layers: its cache is hybrid, and its states take "
            f"{size}",
        )


def rope_findings(target: Described) -> Iterator[Finding]:
    rope = growing_rope(target.model)
    if rope is not None:
        yield _warning(
            f"sequences of more than {rope[1]} tokens are not supported: the target has {rope[0]} "
            "rotary embeddings"
        )


def unsupported(*models: PreTrainedModel) -> str:
    try:
        check_models(models, AssistantModel(models[-1]))
    except UnsupportedModelError as error:
        return str(error)
    return ""


def vocabulary_findings(
    target: Described, draft: Described, overlap: Overlap | None
) -> Iterator[Finding]:
    """Compare the tokenizers and the vocabulary sizes."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    if target.tokenizer is None or draft.tokenizer is None or overlap is None:
        missing = " and ".join(
            described.role for described in (target, draft) if described.tokenizer is None
        )
        unknown = (
            f"no tokenizer was found for {missing}: whether token ids mean the same is unknown"
        )
        counts = f"{sizes[0]} and {sizes[1]} tokens"
        if sizes[0] == sizes[1]:
            yield _warning(unknown)
        elif (
            abs(sizes[0] - sizes[1]) <= MAX_PADDING and target.eos_token_ids == draft.eos_token_ids
        ):
            yield _warning(f"{unknown}; vocabularies of {counts} count as padding")
        else:
            yield Finding(
                "does not fit",
                f"{unknown}, and {counts} differ by more than padding; pass both tokenizers",
            )
    elif not overlap.is_same:
        try:
            vocabulary = intersect_vocabularies(
                target.tokenizer, draft.tokenizer, num_target=sizes[0], num_draft=sizes[1]
            )
        except UnsupportedModelError as error:
            yield Finding("does not fit", str(error))
            return
        num_shared = int(vocabulary.table.is_shared.sum())
        shared = f"{num_shared} of the target's {overlap.num_target} tokens can be drafted"
        yield _warning(
            f"different tokenizers: {shared}; pass tokenizer= and assistant_tokenizer= to "
            "generate()"
        )
    elif sizes[0] != sizes[1]:
        yield _warning(
            f"one tokenizer, but vocabularies padded to {sizes[0]} and {sizes[1]} tokens"
        )


def text_findings(target: Described, draft: Described) -> Iterator[Finding]:
    """Compare EOS token ids and chat templates."""
    if target.eos_token_ids != draft.eos_token_ids:
        ids = [
            ", ".join(map(str, sorted(described.eos_token_ids))) or "none"
            for described in (target, draft)
        ]
        yield _warning(
            f"EOS token ids differ: {ids[0]} in the target, {ids[1]} in the draft; the target's "
            "end the output"
        )
    templates = [
        getattr(described.tokenizer, "chat_template", None) for described in (target, draft)
    ]
    if (
        target.tokenizer is not None
        and draft.tokenizer is not None
        and templates[0] != templates[1]
    ):
        yield _warning(
            "chat templates differ: prompts follow the target's, on which the draft may not be "
            "trained"
        )


def size_findings(target: Described, draft: Described) -> Iterator[Finding]:
    """Yield limits on the speed-up caused by the models' sizes."""
    for described in (target, draft):
        yield from quantisation_findings(described)
    yield from expert_findings(target)
    if draft.size.num_bytes >= target.size.num_bytes:
        yield _warning(
            "the draft has as many bytes as the target: the adaptive schedule never calls it"
        )
    elif all(gain.num_draft_tokens == 0 for gain in estimate_gains(target.size, draft.size)):
        max_rate = max(ACCEPTANCE_PROBABILITIES)
        yield _warning(
            "the draft is too large for a speed-up up to a verified acceptance rate of "
            f"{max_rate:.0%}"
        )


def quantisation_findings(described: Described) -> Iterator[Finding]:
    if described.quantisation:
        yield _warning(
            f"the {described.role} is quantised ({described.quantisation}): its kernels may take "
            "longer than its bytes "
            "suggest, and a forward over several tokens may round differently from one over a "
            "single token"
        )


def expert_findings(target: Described) -> Iterator[Finding]:
    if target.size.num_experts > 1:
        yield _warning(
            f"the target routes each token to {target.size.num_chosen} of "
            f"{target.size.num_experts} experts: verifying "
            "several tokens reads more experts, which estimates of the speed-up include"
        )
