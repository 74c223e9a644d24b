"""Batch prompts, and time calls of the public `generate()` by several methods in turn."""

import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.generation.config_sources import fields_of
from hf_speculate.generation.enable import disable
from hf_speculate.generation.generate import generate
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.options.refill.row_prompts import left_padded
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.methods import OURS, PLAIN, SAMPLING_NAMES, TRANSFORMERS, Method

_WARM_UP_TOKENS = 8
# Errors that transformers' assisted generation raises for unsupported pairs.
_ASSISTED_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
ItemT = TypeVar("ItemT")


class Batch(NamedTuple):
    """The prompts of one call."""

    number: int  # index among all batches
    input_ids: Tensor  # [B, T] int64, left-padded
    attention_mask: Tensor  # [B, T] int64, left-padded
    category: str = ""  # category of all prompts; empty if they differ or have none

    @property
    def rows(self) -> list[Tensor]:
        """Token ids [T] of each prompt, without padding."""
        return [
            ids[mask != 0] for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)
        ]

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def take_in_turn(items: Sequence[ItemT], categories: Sequence[str], num: int | None) -> list[ItemT]:
    """Take items from each category in turn.

    Args:
        items: any objects.
        categories: category of each item.
        num: number of items to take. None for all.
    """
    by_category: dict[str, list[ItemT]] = defaultdict(list)
    for item, category in zip(items, categories, strict=True):
        by_category[category].append(item)
    return [
        item
        for turn in itertools.zip_longest(*by_category.values())
        for item in turn
        if item is not None
    ][:num]


def make_batches(
    prompts: Sequence[Sequence[int]],
    categories: Sequence[str],
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
) -> list[Batch]:
    """Group prompts into full batches of one category, and remaining prompts into mixed batches."""
    groups: list[tuple[str, Sequence[Sequence[int]]]] = []
    waiting: dict[str, list[Sequence[int]]] = defaultdict(list)
    for ids, category in zip(prompts, categories, strict=True):
        waiting[category].append(ids)
        if len(waiting[category]) == batch_size:
            groups.append((category, waiting.pop(category)))
    remaining = [(category, ids) for category, group in waiting.items() for ids in group]
    for start in range(0, len(remaining), batch_size):
        group_categories, group = zip(*remaining[start : start + batch_size], strict=True)
        groups.append((group_categories[0] if len(set(group_categories)) == 1 else "", group))
    return [
        Batch(number, *left_padded(group, pad_token_id, device), category)
        for number, (category, group) in enumerate(groups)
    ]


class Run(NamedTuple):
    """A timed call."""

    batch: Batch
    repeat: int  # index of the repetition
    seconds: float
    texts: list[list[int]]  # new token ids of each row, up to EOS
    stats: SpeculationStats | None  # None for other engines
    # time from the start of the call to the end of the target's first forward
    first_token_s: float | None = None
    peak_bytes: int | None = None  # peak memory on a CUDA device; None elsewhere

    @property
    def key(self) -> tuple[int, int]:
        """Indices of the batch and the repetition; runs with equal keys are compared."""
        return self.batch.number, self.repeat

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token of the longest row, after its first token.

        None if the row has only one token, or if the time to the first token is unknown.
        """
        num_later_tokens = max(map(len, self.texts)) - 1
        if self.first_token_s is None or num_later_tokens < 1:
            return None
        return 1000 * (self.seconds - self.first_token_s) / num_later_tokens


class Decoder:
    """Timed calls of `generate()` on one target.

    The decoder uses views of the caller's models, which stay unchanged.

    Args:
        target: the target model.
        draft_arguments: arguments that give the draft source, such as `assistant_model` or
            `drafter`, and tokenizers.
        arguments: arguments of `generate()` shared by all methods.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft_arguments: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ):
        self.target = _view(unwrapped(target))
        self.tokenizer: PreTrainedTokenizerBase | None = draft_arguments.get("tokenizer")
        eos = getattr(self.target.generation_config, "eos_token_id", None)
        self.eos_token_ids = frozenset(
            eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        )
        self.draft: PreTrainedModel | None = None  # None even if there is a draft head
        self._draft_arguments = dict(draft_arguments)
        draft = unwrapped(draft_arguments.get("assistant_model"), "assistant_model")
        if isinstance(draft, PreTrainedModel):
            self.draft = self._draft_arguments["assistant_model"] = _view(draft)
        self._assistants: dict[str, PreTrainedModel] = {}  # name of the method -> view of the draft
        self._arguments = arguments

    def options(self, do_sample: bool) -> dict[str, Any]:
        """Return the arguments shared by all sampling methods, or by all greedy methods."""
        arguments = {
            name: value
            for name, value in self._arguments.items()
            if do_sample or name not in SAMPLING_NAMES
        }
        return arguments | {"do_sample": do_sample}

    def __call__(
        self, method: Method, batch: Batch, seed: int, max_new_tokens: int | None = None
    ) -> Run:
        """Decode a batch, wait for the device, and return the timed run."""
        options = {**self.options(method.do_sample), **method.options}
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        stats: SpeculationStats | None = None
        if method.do_sample:
            torch.manual_seed(seed)
        if method.engine == OURS:
            stats, seeded = SpeculationStats(), {"seed": seed} if method.do_sample else {}
            options |= {
                **self._draft_arguments,
                **seeded,
                **method.fields,
                "speculation_stats": stats,
            }
        device = self.target.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        first_s: list[float] = []

        def end_first_forward(*_: Any) -> None:
            hook.remove()  # later forwards may be compiled
            _synchronize(device)
            first_s.append(time.perf_counter() - begin)

        begin = time.perf_counter()
        hook = self.target.register_forward_hook(end_first_forward)
        try:
            if method.engine == TRANSFORMERS:
                new_ids = self._assisted(method, batch, options)
            else:
                decode: Any = (
                    self.target.generate if stats is None else partial(generate, self.target)
                )
                output = decode(**batch.inputs, **{"tokenizer": self.tokenizer, **options})
                new_ids = list(output[:, batch.input_ids.shape[1] :])
        finally:
            hook.remove()
        _synchronize(device)
        seconds = time.perf_counter() - begin
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        texts = [up_to_eos(ids.tolist(), self.eos_token_ids) for ids in new_ids]
        return Run(batch, 0, seconds, texts, stats, first_s[0] if first_s else None, peak_bytes)

    def _assisted(self, method: Method, batch: Batch, options: dict[str, Any]) -> list[Tensor]:
        """Run transformers' assisted generation row by row, because it supports only one row."""
        arguments = dict(self._draft_arguments)
        if "prompt_lookup_num_tokens" in method.fields:
            arguments = {"tokenizer": self.tokenizer, **method.fields}
        elif self.draft is not None:
            arguments["assistant_model"] = self._assistant(method, self.draft)
        new_ids = []
        for ids in batch.rows:
            output: Any = self.target.generate(  # type: ignore[operator]
                input_ids=ids[None],
                attention_mask=torch.ones_like(ids)[None],
                **arguments,
                **options,
            )
            new_ids.append(output[0, len(ids) :])
        return new_ids

    def _assistant(self, method: Method, draft: PreTrainedModel) -> PreTrainedModel:
        """Return a view of the draft with the method's draft length.

        transformers reads the draft length from the assistant's generation config.
        """
        if method.name not in self._assistants:
            view = self._assistants[method.name] = _view(draft)
            if method.fields:
                view.generation_config.update(**method.fields, assistant_confidence_threshold=0.0)
        return self._assistants[method.name]


def up_to_eos(ids: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    end = next((index for index, token_id in enumerate(ids) if token_id in eos_token_ids), len(ids))
    return ids[: end + 1]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _view(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model without its weights; the copy is not enabled and has no speculative fields.

    Plain decoding would read these fields from the generation config.
    """
    view = disable(copy.copy(model))
    view.generation_config = copy.deepcopy(model.generation_config)
    vars(view.generation_config).update(dict.fromkeys(fields_of(view.generation_config)))
    return view


Runs = dict[str, list[Run]]  # name of the method -> its runs
# called after each call; the run is None for a warm-up
OnStep = Callable[[Method, Run | None], object]


class Measured(NamedTuple):
    """The timed calls of several methods."""

    runs: Runs
    left_out: dict[str, str]  # name of a method of transformers that failed -> error
    is_interrupted: bool = False


def measure(
    methods: Sequence[Method],
    batches: Sequence[Batch],
    decode: Decoder,
    *,
    repeats: int = 1,
    is_warm: bool = False,
    seed: int = 0,
    on_step: OnStep = lambda method, run: None,
) -> Measured:
    """Time all methods on all batches.

    The methods decode each batch in turn, so a change in the machine's load affects all of them.
    Ctrl-C ends the measurement and returns the calls so far.

    Args:
        methods: methods with distinct names.
        batches: at least one batch.
        decode: runs one call.
        repeats: number of calls per method and batch.
        is_warm: whether to skip the warm-up, which decodes a few untimed tokens per method.
        seed: seed of the first call; each batch and repetition has its own seed.
        on_step: called after each call.
    """
    runs: Runs = {method.name: [] for method in methods}
    left_out: dict[str, str] = {}

    def attempt(
        method: Method, batch: Batch, index: int, max_new_tokens: int | None = None
    ) -> Run | None:
        if method.name in left_out:
            return None
        try:
            return decode(method, batch, seed + index, max_new_tokens)
        except _ASSISTED_ERRORS as error:
            if method.engine != TRANSFORMERS:
                raise
            first_line = str(error).partition("\n")[0]
            left_out[method.name] = f"{type(error).__name__}: {first_line}"
            del runs[method.name]
            return None

    devices = {batch.input_ids.device for batch in batches if batch.input_ids.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for method in () if is_warm else methods:
                attempt(method, batches[0], 0, _WARM_UP_TOKENS)
                on_step(method, None)
            for repeat, batch in itertools.product(range(repeats), batches):
                index = repeat * len(batches) + batch.number
                for method in methods if index % 2 == 0 else reversed(methods):
                    if (run := attempt(method, batch, index)) is not None:
                        runs[method.name].append(run._replace(repeat=repeat))
                        on_step(method, run)
        except KeyboardInterrupt:
            return Measured(_comparable(runs, methods), left_out, is_interrupted=True)
    return Measured(runs, left_out)


def ratios(runs: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    """Compute each run's speed-up over the plain run of the same batch and repetition."""
    speeds = {run.key: run.tokens_per_s for run in plain}
    return [run.tokens_per_s / speeds[run.key] for run in runs]


def of_equal_texts(runs: Runs, methods: Iterable[Method]) -> Runs:
    """Select the batches and repetitions for which all exact greedy methods give equal texts.

    After a near-tie, a method may decode another text, with other drafts and perhaps fewer tokens,
    so its speed is not comparable. The texts of sampling and lossy methods are not compared, but
    their runs are selected by the same keys.
    """
    exact = [
        method.name
        for method in methods
        if not (method.do_sample or method.is_lossy) and method.name in runs
    ]
    by_key: dict[tuple[int, int], set[str]] = defaultdict(set)
    for name in exact:
        for run in runs[name]:
            by_key[run.key].add(str(run.texts))
    return {
        name: [run for run in method_runs if len(by_key.get(run.key, ())) < 2]
        for name, method_runs in runs.items()
    }


def _comparable(runs: Runs, methods: Sequence[Method]) -> Runs:
    """Select the batches that all plain methods decoded; leave out methods without any."""
    plain_keys = [
        {run.key for run in runs[method.name]} for method in methods if method.engine == PLAIN
    ]
    keys = set.intersection(*plain_keys) if plain_keys else set()
    comparable = {
        name: [run for run in method_runs if run.key in keys] for name, method_runs in runs.items()
    }
    return {name: method_runs for name, method_runs in comparable.items() if method_runs}
