"""Model pairs for benchmarks: the bundled pair, and random pairs with known acceptance rates."""

import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _harness import ROOT, wait
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
)

from hf_speculate.models.foreign_code import KNOWN_PACKAGES
from hf_speculate.tools.bench.decoding import Batch, make_batches

# The hooks in this file count forwards or treat each token independently.
KNOWN_PACKAGES.add(__name__.partition(".")[0])

PAIR = ROOT / "examples" / "pair"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
}
_QWEN2 = {
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
# Target and draft by name. The weights are random, because only the amount of work matters.
SHAPES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "llama-8b": (
        LlamaConfig,
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
        {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    ),
    "qwen2-0.5b": (
        Qwen2Config,
        {**_QWEN2, "num_hidden_layers": 24},
        {**_QWEN2, "num_hidden_layers": 1},
    ),
}
MIN_PROMPT_TOKENS = 32  # shortest length of a bundled prompt
# Lifts a logit above all others of a random model, even in bfloat16, so that sampling chooses it.
BUMP = 100.0


class Oracle:
    """Hooks that fix the likeliest tokens of both models.

    The acceptance rate is then known, although all work is done. Every complete forward of either
    model, including the output matrix, adds `BUMP` to one logit per position. A random cycle
    through the vocabulary gives each token a successor. In the target, the logit is that of the
    successor, so the text follows the cycle. In the draft, it is the same logit for a share
    `acceptance` of the vocabulary, and that of the successor's successor otherwise. Nothing else
    affects the tokens, so every engine sees the same text and the same agreement.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, acceptance: float, seed: int = 0
    ):
        self.is_on = True
        self.acceptance = acceptance
        vocab_size = target.config.vocab_size
        generator = torch.Generator().manual_seed(seed)
        cycle = torch.randperm(vocab_size, generator=generator)
        successor = torch.empty_like(cycle)
        successor[cycle] = cycle.roll(-1)
        self._successor = successor
        agrees = torch.zeros(vocab_size, dtype=torch.bool)
        agrees[
            torch.randperm(vocab_size, generator=generator)[: round(acceptance * vocab_size)]
        ] = True
        drafted = torch.where(agrees, successor, successor[successor])
        for model, following in ((target, successor), (draft, drafted)):
            model.register_forward_hook(
                partial(self._bump, following.to(model.device)), with_kwargs=True
            )

    def _bump(
        self,
        following: Tensor,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not self.is_on:
            return
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        index = following[ids[:, -output.logits.shape[1] :]][..., None]  # [B, Q', 1]
        output.logits.scatter_add_(-1, index, output.logits.new_full((), BUMP).expand(index.shape))

    def text(self, prompt_ids: Tensor, num_new: int) -> Tensor:
        """Return a prompt [B, T] with its greedy continuation, [B, T + num_new], on the CPU."""
        columns = [prompt_ids.cpu()]
        for _ in range(num_new):
            columns.append(self._successor[columns[-1][:, -1:]])
        return torch.cat(columns, dim=1)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Make both models return their logits unchanged."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class ForwardClock:
    """Hooks that time the forwards of both models."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel):
        self.is_profiling = False
        self.reset()
        for model in (target, draft):
            model.register_forward_pre_hook(partial(self._before, model is target))
            model.register_forward_hook(partial(self._after, model is target))

    def reset(self) -> None:
        """Start a call."""
        self.is_prefilled = False
        self.prefill_s = 0.0  # seconds of the target's first forward
        self.forward_s = 0.0  # seconds of all later forwards; measured only while profiling

    def _before(self, is_target: bool, *_: Any) -> None:
        if self.is_profiling or (is_target and not self.is_prefilled):
            wait()
            self._begin = time.perf_counter()

    def _after(self, is_target: bool, *_: Any) -> None:
        if self.is_profiling and self.is_prefilled:
            wait()
            self.forward_s += time.perf_counter() - self._begin
        elif is_target and not self.is_prefilled:
            wait()
            self.is_prefilled = True
            self.prefill_s = time.perf_counter() - self._begin


@dataclass
class Subject:
    """A target and a draft to decode with.

    Neither model ends a text on its own, so every method does the same work.

    Args:
        name: "pair" or a key of `SHAPES`.
        dtype: a key of `DTYPES`.
        target, draft: models on one device.
        oracle: hooks that fix the acceptance rate.
            None to leave the logits unchanged.
    """

    name: str
    dtype: str
    target: PreTrainedModel
    draft: PreTrainedModel
    oracle: Oracle | None = None
    clock: ForwardClock = field(init=False)

    def __post_init__(self) -> None:
        for model in (self.target, self.draft):
            model.generation_config.eos_token_id = None
        self.clock = ForwardClock(self.target, self.draft)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def batches(
        self, num_prompts: int, batch_size: int, prompt_len: int | None = None
    ) -> list[Batch]:
        """Return batches of bundled prompts, or of random ids for an oracle."""
        if self.oracle is None:
            return read_batches(num_prompts, batch_size, prompt_len, self.device)
        generator = torch.Generator().manual_seed(1)
        shape = (max(num_prompts // batch_size, 1), batch_size, prompt_len or 128)
        ids = torch.randint(self.target.config.vocab_size, shape, generator=generator).to(
            self.device
        )
        return [
            Batch(number, batch_ids, torch.ones_like(batch_ids))
            for number, batch_ids in enumerate(ids)
        ]


def load(folder: Path, dtype: str, device: torch.device | str = "cpu") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval().to(device)


def random_model(config: Any, dtype: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Make a random model from a config, directly on its device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    return model.requires_grad_(False)


def load_pair(dtype: str, device: torch.device, draft: str = "bundled") -> Subject:
    """Load the bundled target and a draft.

    Args:
        dtype: a key of `DTYPES`.
        device: device of both models.
        draft: "bundled", "random" with the same shape, or "large" for a copy of the target.
    """
    target = load(PAIR / "target", dtype, device)
    match draft:
        case "bundled":
            model = load(PAIR / "draft", dtype, device)
        case "random":
            model = random_model(load(PAIR / "draft", dtype).config, dtype, device)
        case _:
            model = copy.deepcopy(target)
    return Subject("pair", dtype, target, model)


def random_pair(
    name: str, dtype: str, device: torch.device, layers: int | None = None, draft_layers: int = 0
) -> list[PreTrainedModel]:
    """Make a random target and draft with the shape `name` on the device.

    Args:
        name: a key of `SHAPES`.
        dtype: a key of `DTYPES`.
        device: device of both models.
        layers: number of target layers.
            None or 0 for the number in the shape.
        draft_layers: number of draft layers. 0 for the number in the shape.
    """
    make, *both = SHAPES[name]
    models = []
    for seed, (fields, num_layers) in enumerate(zip(both, (layers, draft_layers), strict=True)):
        num_layers = num_layers or fields["num_hidden_layers"]
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        config = make(**{**fields, **ids, "num_hidden_layers": num_layers})
        models.append(random_model(config, dtype, device, seed))
    return models


def load_shape(
    name: str,
    dtype: str,
    device: torch.device,
    acceptance: float,
    layers: int | None = None,
    draft_layers: int = 0,
) -> Subject:
    """Make a random pair with the shape `name` and a fixed acceptance rate.

    See `random_pair` for the arguments.
    """
    models = random_pair(name, dtype, device, layers, draft_layers)
    return Subject(name, dtype, *models, oracle=Oracle(*models, acceptance))


def read_prompts() -> dict[str, list[str]]:
    """Return the bundled prompts by category."""
    by_category: dict[str, list[str]] = {}
    for line in (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        by_category.setdefault(prompt["category"], []).append(prompt["turns"][0])
    return by_category


def encode(
    prompts: list[str],
    batch_size: int,
    prompt_len: int | None = None,
    device: torch.device | str = "cpu",
    folder: Path = PAIR / "target",
) -> list[Batch]:
    """Return left-padded batches of texts.

    With `prompt_len`, each text is extended with the following texts to exactly this length. The
    tokenizer comes from the model in `folder`.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="right")
    how: dict[str, Any] = {}
    if prompt_len is not None:
        num_texts = prompt_len // MIN_PROMPT_TOKENS + 1
        prompts = [
            "\n\n".join(prompts[(i + j) % len(prompts)] for j in range(num_texts))
            for i in range(len(prompts))
        ]
        how.update(truncation=True, max_length=prompt_len)
    token_ids = tokenizer(prompts, **how)["input_ids"]
    return make_batches(
        token_ids, [""] * len(prompts), tokenizer.pad_token_id, batch_size, torch.device(device)
    )


def read_batches(
    num_prompts: int,
    batch_size: int,
    prompt_len: int | None = None,
    device: torch.device | str = "cpu",
) -> list[Batch]:
    """Return full batches of bundled prompts, taken from every category in turn."""
    prompts = [text for texts in read_prompts().values() for text in texts]
    num_prompts = min(max(num_prompts // batch_size, 1) * batch_size, len(prompts))
    chosen = [prompts[index * len(prompts) // num_prompts] for index in range(num_prompts)]
    return encode(chosen, batch_size, prompt_len, device)
