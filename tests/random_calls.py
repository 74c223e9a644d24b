"""Describe random `generate()` calls by plain values, and build their models and arguments."""

import copy
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.models.language_model import vocab_size_of
from tests.compatibility_rows import Shift, StopAtSum
from tests.options.heads.kinds import KINDS as HEADS
from tests.options.uno.adapters import make_tensors, write_adapter
from tests.reliability.bad_drafts import with_fault
from tests.support.forced_texts import ForcedGrammar, TextMachine, pieces
from tests.support.tiny import MORE_FAMILIES, TINY_FAMILIES, make_model, noisy_copy, ragged_prompts
from tests.support.tiny_configs import RECURRENT_FAMILIES
from tests.support.tiny_encoders import make_bart, make_t5, make_whisper, speech
from tests.support.tiny_families import FAMILIES, make_family
from tests.support.tiny_readers import COLUMN_COUNTERS, ENCODERS, READERS, READINGS
from tests.support.tiny_wrappers import WRAPPERS

# larger ids stand for images, audio and Whisper's timestamps; heads have 32 ids
LARGEST_PROMPT_ID = 48
_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": make_t5,
    "bart": make_bart,
    **COLUMN_COUNTERS,
}
_MAKERS |= {
    family: partial(make_model, family)
    for family in (*TINY_FAMILIES, *MORE_FAMILIES, *RECURRENT_FAMILIES)
}
_MAKERS |= {name: partial(make_family, name) for name in FAMILIES}
_MAKERS |= {"mpt": partial(make_model, "mpt", dtype=torch.float32), "whisper": make_whisper}
_READERS = (
    READINGS | READERS | ENCODERS | {name: wrapper.make for name, wrapper in WRAPPERS.items()}
)
READER_NAMES = tuple(_READERS)
# used as families, together with their targets
HEAD_NAMES = tuple(f"{family} head" for family in HEADS)
FAMILY_NAMES = (*_MAKERS, *READER_NAMES, *HEAD_NAMES)

PADDINGS = ("none", "left", "right", "holes", "empty row")
CACHES = ("auto", "dynamic", "preallocated", "static")
PASSED = ("no", "empty", "with config")
DRAFTERS = (
    "model",
    "other model",
    "lookup",
    "model and lookup",
    "early exit",
    "generator",
    "store",
    "state",
)
WITH_MODELS = ("model", "other model", "model and lookup", "state")
SCHEDULES = ("constant", "heuristic", "adaptive")
OUTPUTS = ("scores", "logits", "hidden_states", "attentions")
PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [3, 9, 31],
    "begin_suppress_tokens": [4, 17],
    "bad_words_ids": [[5], [7, 8]],
    "sequence_bias": [[[12], 2.0], [[20, 21], -4.0]],
    "forced_eos_token_id": 11,
    "renormalize_logits": True,
    "min_new_tokens": 6,
    "encoder_repetition_penalty": 1.4,
}
WARPERS = {"temperature": 0.6, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "typical_p": 0.6}


@dataclass(frozen=True, repr=False)
class Case:
    """One call, with the simplest values as defaults.

    Shrinking resets fields to their defaults.
    """

    family: str
    prompt_seed: int = 0
    batch_size: int = 1
    padding: str = "none"
    decoder_prompt: str = "none"  # padding in encoder-decoders: none, left or holes
    max_new_tokens: int = 16
    num_turns: int = 1
    passed: str = "no"
    cache: str = "auto"
    drafter: str = "model"
    noise: float = 0.05
    num_assistant_tokens: int = 3
    schedule: str = "constant"
    confidence: float = 0.0
    samples: bool = False
    verifier: str = ""  # empty: greedy, or coupled if `samples`
    draft_sampling: str = ""
    num_return_sequences: int = 1
    # EOS ids: the tokens at these indices in the first row of the plain text
    ends: tuple[int, ...] = ()
    own_processor: bool = False
    has_grammar: bool = False  # a grammar forces and drafts part of the text
    own_criterion: bool = False
    processors: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    prefill_chunk_size: int = 0
    embeds: bool = False
    fault: str = ""  # fault in the draft, see `tests.reliability.bad_drafts`
    fault_at: int = 1

    def simpler(self) -> list["Case"]:
        """Yield the case with one field reset to its default, or with one entry removed."""
        cases, plain = [], Case(self.family)
        for name, value in vars(self).items():
            if value == getattr(plain, name):
                continue
            if isinstance(value, tuple):
                cases += [
                    replace(self, **{name: value[:at] + value[at + 1 :]})
                    for at in range(len(value))
                ]
            cases.append(replace(self, **{name: getattr(plain, name)}))
        return cases

    def __repr__(self) -> str:
        plain = Case(self.family)
        changed = (
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if value != getattr(plain, name)
        )
        return f"Case({self.family!r}, {', '.join(changed)})"


def draw_case(
    seed: int, index: int, families: tuple[str, ...] = FAMILY_NAMES, faults: tuple[str, ...] = ()
) -> Case:
    """Draw the case with this number, always the same one, with one of the faults in its draft."""
    draw = random.Random(f"{seed}:{index}")
    family = families[index % len(families)]
    is_reader = family in _READERS
    batch_size = 2 if is_reader else draw.choice((1, 1, 2, 3, 4))
    samples = draw.random() < 0.2
    outputs = [name for name in OUTPUTS if draw.random() < 0.25]
    if batch_size > 1:
        outputs = [name for name in outputs if name in OUTPUTS[:2]]
    names = list(PROCESSORS) + (list(WARPERS) if samples else [])
    cache_kind = draw.choice(("auto", *CACHES))
    drafters = DRAFTERS if batch_size == 1 and not samples else tuple(set(DRAFTERS) - {"generator"})
    is_head = family in HEAD_NAMES
    drafters = WITH_MODELS if faults else drafters
    case = Case(
        family=family,
        prompt_seed=draw.randrange(1000),
        batch_size=batch_size,
        padding=draw.choice(PADDINGS),
        decoder_prompt=draw.choice(("none", "none", "left", "holes")),
        max_new_tokens=draw.choice((1, 2, 5, 16, 24)),
        num_turns=1 if is_reader else draw.choice((1, 1, 2, 3)),
        passed=draw.choice(("no", *PASSED)) if cache_kind != "static" else "no",
        cache=cache_kind,
        drafter=draw.choice(("model", "model", *sorted(drafters))),
        noise=draw.choice((0.0, 0.03, 0.1, 10.0)),
        num_assistant_tokens=draw.choice((1, 2, 3, 5, 9)),
        schedule=draw.choice(("constant", "constant", *SCHEDULES)),
        confidence=draw.choice((0.0, 0.0, 0.5)),
        samples=samples,
        num_return_sequences=draw.choice((1, 2)) if samples and outputs == [] else 1,
        ends=tuple(draw.sample(range(12), draw.choice((0, 0, 1, 2)))),
        own_processor=draw.random() < 0.1,
        own_criterion=draw.random() < 0.1,
        processors=tuple(draw.sample(names, draw.choice((0, 0, 1, 2)))),
        outputs=tuple(outputs),
        prefill_chunk_size=draw.choice((0, 0, 0, 3)) if not is_reader else 0,
        embeds=not is_reader and draw.random() < 0.1,
        has_grammar=not is_reader and family != "whisper" and draw.random() < 0.1,
    )
    if is_head:
        case = replace(case, drafter="head", embeds=False)
    # Faults need calls that draft. Few models rule out "auto", and the adaptive schedule never runs
    # a draft model of the target's size.
    if faults:
        cache_kind = "auto" if case.cache == "preallocated" else case.cache
        schedule = (
            "heuristic"
            if case.schedule == "adaptive" and case.drafter != "other model"
            else case.schedule
        )
        case = replace(case, cache=cache_kind, schedule=schedule)
        case = replace(case, fault=draw.choice(faults), fault_at=draw.choice((1, 1, 2, 3, 4, 6, 9)))
    return case


@cache
def target_of(family: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return an enabled model and the fixed arguments for its prompt."""
    if family in HEAD_NAMES:
        return hf_speculate.enable(head_of(family)[1]), {}
    if family in _READERS:
        reading = _READERS[family]()
        return hf_speculate.enable(reading.target), reading.inputs
    return hf_speculate.enable(_MAKERS[family]()), {}


@cache
def head_of(family: str) -> tuple[Any, PreTrainedModel]:
    """Make a draft head and a separate target."""
    with tempfile.TemporaryDirectory() as folder:
        head, target = HEADS[family.removesuffix(" head")](Path(folder))
    return head, copy.deepcopy(target)


@cache
def uno_of(family: str) -> tuple[hf_speculate.UnoAdapter, Any]:
    """Make a Uno adapter for a model of the family, and return it with its folder."""
    folder = tempfile.TemporaryDirectory()
    tensors = make_tensors(target_of(family)[0])
    return hf_speculate.UnoAdapter(write_adapter(Path(folder.name), tensors)), folder


@cache
def draft_of(family: str, noise: float) -> PreTrainedModel:
    """Make a noisy copy of the family's model."""
    return noisy_copy(target_of(family)[0], noise)


@cache
def other_draft() -> PreTrainedModel:
    """Make a small model of another family."""
    return make_model("llama", num_hidden_layers=1, seed=7)


def prompts_of(case: Case) -> dict[str, Any]:
    """Return the arguments of the first turn."""
    model, inputs = target_of(case.family)
    if inputs:
        return dict(inputs)
    if case.family == "whisper":
        return {"input_features": speech(case.batch_size, seed=case.prompt_seed)}
    num_ids = min(LARGEST_PROMPT_ID, vocab_size_of(model))
    text = _padded(case.padding, case.batch_size, case.prompt_seed, num_ids)
    if not model.config.is_encoder_decoder:
        if case.embeds:
            embed: Any = model.get_input_embeddings()
            text["inputs_embeds"] = embed(text.pop("input_ids"))
        return text
    if case.decoder_prompt != "none":
        decoder = _padded(case.decoder_prompt, case.batch_size, case.prompt_seed + 1, num_ids)
        text |= {f"decoder_{name}": value for name, value in decoder.items()}
    return text


def _padded(padding: str, batch_size: int, seed: int, num_ids: int) -> dict[str, Tensor]:
    min_len = 9 if padding == "none" else 5
    inputs = ragged_prompts(batch_size, seed=seed, min_len=min_len, max_len=9, vocab_size=num_ids)
    mask = inputs["attention_mask"]
    if padding == "right":
        return {name: value.flip(1) for name, value in inputs.items()}
    if padding == "holes":
        mask[:, -3] = 0
        mask[0, -1] = 0
    if padding == "empty row":
        mask[-1] = 0
    return inputs


def options_of(case: Case, eos_token_ids: list[int]) -> dict[str, Any]:
    """Return the options that are shared with plain decoding."""
    options: dict[str, Any] = {"max_new_tokens": case.max_new_tokens}
    options |= {name: (PROCESSORS | WARPERS)[name] for name in case.processors}
    own = {
        "eos_token_id": eos_token_ids,
        "prefill_chunk_size": case.prefill_chunk_size,
        "verifier": case.verifier,
    }
    own["logits_processor"] = [Shift()] if case.own_processor else []
    if case.has_grammar:
        size = min(vocab_size_of(target_of(case.family)[0]), LARGEST_PROMPT_ID)
        own["logits_processor"] += [ForcedGrammar(TextMachine(size))]
        options["tokenizer"] = pieces(size)
    own["stopping_criteria"] = [StopAtSum()] if case.own_criterion else []
    options |= {name: value for name, value in own.items() if value}
    if case.samples:
        options |= {
            "do_sample": True,
            "verifier": case.verifier or "coupled",
            "seed": case.prompt_seed,
        }
        options["num_return_sequences"] = case.num_return_sequences
    outputs = {f"output_{name}": True for name in ("logits", *case.outputs)}
    return options | outputs | {"return_dict_in_generate": True}


def draft_options(case: Case) -> dict[str, Any]:
    """Return the options for speculative decoding."""
    options: dict[str, Any] = {"num_assistant_tokens": case.num_assistant_tokens}
    if case.drafter != "generator":
        options["num_assistant_tokens_schedule"] = case.schedule
    if case.cache != "auto":
        options["cache_implementation" if case.cache == "static" else "speculation_cache"] = (
            case.cache
        )
    own = {"draft_sampling": case.draft_sampling, "assistant_confidence_threshold": case.confidence}
    options |= {name: value for name, value in own.items() if value}
    match case.drafter:
        case "generator":
            options["candidate_generator"] = PromptLookupCandidateGenerator(
                num_output_tokens=case.num_assistant_tokens
            )
        case "early exit":
            options["assistant_early_exit"] = 1
        case "head":
            options["assistant_model"] = head_of(case.family)[0]
        case "other model":
            options["assistant_model"] = other_draft()
        case "uno":
            options["assistant_model"] = uno_of(case.family)[0]
        case "model" | "model and lookup" | "state":
            options["assistant_model"] = draft_of(case.family, case.noise)
    if case.fault:
        options["assistant_model"] = with_fault(
            options["assistant_model"], case.fault, case.fault_at, case.prompt_seed
        )
    if case.drafter in ("lookup", "store", "model and lookup"):
        options["prompt_lookup_num_tokens"] = case.num_assistant_tokens
    if case.drafter in ("store", "state"):
        is_store = case.drafter == "store"
        options |= (
            {"suffix_store": hf_speculate.SuffixStore()}
            if is_store
            else {"draft_state": hf_speculate.DraftState()}
        )
    return options


def cache_of(case: Case) -> Any:
    """Make a new cache to pass, or return None to let transformers make one."""
    if case.passed == "no":
        return None
    model, _ = target_of(case.family)
    config = model.config.get_text_config(decoder=True)
    own = DynamicCache(config=config) if case.passed == "with config" else DynamicCache()
    return EncoderDecoderCache(own, DynamicCache()) if model.config.is_encoder_decoder else own
