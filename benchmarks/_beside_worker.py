"""Run jobs with one library; the other side of `beside_others.py`.

    python benchmarks/_beside_worker.py LIBRARY < jobs

The script imports only torch, transformers and the library, so it runs in each library's
environment. Each line of input is a job, and each line of output is the result of a job, or
`{"error": first line}`.
"""

import json
import signal
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LOOKUP_TOKENS = 10  # transformers has no default
Inputs = dict[str, Tensor]
# Sizes of tiny models; a config takes the fields that it has.
SIZES: dict[int | float | None, str] = {
    64: "vocab_size",
    32: "hidden_size d_model n_embd word_embed_proj_dim",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size",
    16: "kv_lora_rank q_lora_rank mamba_d_head mamba_head_dim",
    8: "head_dim query_pre_attn_scalar sliding_window qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size chunk_size "
    "mamba_chunk_size rotary_dim",
    4: "num_attention_heads n_head encoder_attention_heads decoder_attention_heads mamba_n_heads "
    "linear_num_value_heads mamba_num_heads num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers n_layer encoder_layers decoder_layers num_key_value_heads n_groups "
    "linear_num_key_heads mamba_n_groups num_experts_per_tok",
    1: "n_group topk_group n_shared_experts",
    0.3: "initializer_range init_std",  # peaked attention: the text depends on all tokens
    512: "max_position_embeddings n_positions max_seq_len",
    0: "pad_token_id",
    None: "bos_token_id eos_token_id forced_eos_token_id",
}


class Plain:
    """Plain decoding."""

    takes_rows = True

    def __init__(self, target: PreTrainedModel, draft_folder: str | None) -> None:
        self.target = target

    def __call__(self, inputs: Inputs, draft_len: int | None, **settings: Any) -> Tensor:
        return self.target.generate(**inputs, **settings)


class Transformers:
    """Assisted generation of one row; a constant length is set in the draft's generation config."""

    takes_rows = False

    def __init__(self, target: PreTrainedModel, draft_folder: str | None) -> None:
        self.target = target
        self.draft = None if draft_folder is None else load(draft_folder)

    def __call__(self, inputs: Inputs, draft_len: int | None, **settings: Any) -> Tensor:
        if self.draft is None:
            source = {"prompt_lookup_num_tokens": draft_len or LOOKUP_TOKENS}
            return self.target.generate(**inputs, **source, **settings)
        self.draft.generation_config = GenerationConfig()
        if draft_len is not None:
            self.draft.generation_config.update(
                num_assistant_tokens=draft_len,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
        return self.target.generate(**inputs, assistant_model=self.draft, **settings)


class HfSpeculate:
    """An enabled model."""

    takes_rows = True

    def __init__(self, target: PreTrainedModel, draft_folder: str | None) -> None:
        import hf_speculate
        from hf_speculate.models.foreign_code import KNOWN_PACKAGES

        KNOWN_PACKAGES.add(__name__)  # the timers below change nothing
        self.target = hf_speculate.enable(target)
        self.draft = None if draft_folder is None else load(draft_folder)

    def __call__(self, inputs: Inputs, draft_len: int | None, **settings: Any) -> Tensor:
        if draft_len is not None:
            settings["num_assistant_tokens_schedule"] = "constant"
        if self.draft is None:
            settings["prompt_lookup_num_tokens"] = draft_len or LOOKUP_TOKENS
        elif draft_len is not None:
            settings["num_assistant_tokens"] = draft_len
        return self.target.generate(**inputs, assistant_model=self.draft, **settings)


class Economize:
    """Wrapper of the model with a drafter; a cycle has the drafts and one exact token."""

    takes_rows = True

    def __init__(self, target: PreTrainedModel, draft_folder: str | None) -> None:
        import economize
        from economize.techniques.draft_model import DraftModelConfig
        from economize.techniques.lookup import LookupConfig

        source = LookupConfig() if draft_folder is None else DraftModelConfig(model=draft_folder)
        self.model, self.make_config = economize.apply(target, source), economize.DecodeConfig

    def __call__(self, inputs: Inputs, draft_len: int | None, **settings: Any) -> Tensor:
        fields: dict[str, Any] = {} if draft_len is None else {"cycle_length": draft_len + 1}
        if settings.get("do_sample"):
            fields["verifier"] = "rejection"
        return self.model.generate(**inputs, decoding=self.make_config(**fields), **settings)


class FlashSpec:
    """A separate engine that takes token ids without a mask."""

    takes_rows = False

    def __init__(self, target: PreTrainedModel, draft_folder: str | None) -> None:
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        where = (torch.device("cpu"), target.dtype)
        self.target = TargetModel("target", *where, model=target)
        self.is_lookup = draft_folder is None
        self.drafter = (
            NgramDrafter()
            if draft_folder is None
            else HuggingFaceDrafter("draft", *where, model=load(draft_folder))
        )

    def __call__(self, inputs: Inputs, draft_len: int | None, **settings: Any) -> Tensor:
        temperature = settings.get("temperature", 0.0)
        engine = self._engine(draft_len, temperature, settings.get("top_p", 1.0))
        if not self.is_lookup:
            self.drafter.set_temperature(temperature)
        result = engine.generate(inputs["input_ids"], max_new_tokens=settings["max_new_tokens"])
        return torch.cat((inputs["input_ids"], result.output_ids), dim=1)

    @cache  # noqa: B019  # lives as long as the process
    def _engine(self, draft_len: int | None, temperature: float, top_p: float) -> Any:
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine

        gamma = {} if draft_len is None else {"gamma": draft_len}
        sampling = SamplingConfig(temperature=temperature, top_p=top_p, **gamma)
        fields: dict[str, Any] = {}  # by default, lookup and the draft model
        if self.is_lookup or draft_len is not None:
            fields = {"drafter_strategy": "bandit", "bandit": BanditConfig(n_arms=1)}
        config = FlashSpecConfig(device="cpu", sampling=sampling, **fields)
        return SpeculativeEngine(config, [self.drafter], self.target)


LIBRARIES: dict[str, Any] = {
    "plain": Plain,
    "transformers": Transformers,
    "hf_speculate": HfSpeculate,
    "economize": Economize,
    "flashspec": FlashSpec,
}


@cache
def load(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every call generates all its tokens
    return model.requires_grad_(False)


@cache
def adapter(library: str, target_folder: str, draft_folder: str | None) -> Any:
    return LIBRARIES[library](load(target_folder), draft_folder)


def length_of(name: str) -> int | None:
    return None if name == "default" else int(name)


def left_padded(rows: list[list[int]]) -> Inputs:
    """Return ids and mask [B, T] of token lists."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def speed(library: str, job: dict[str, Any]) -> dict[str, Any]:
    """Time plain decoding and each draft length alternately; rows run one by one if they must."""
    method, settings = adapter(library, job["target"], job["draft"]), job["settings"]
    plain = Plain(load(job["target"]), None)

    def run(name: str, rows: list[list[int]], **changes: Any) -> list[list[int]]:
        decode, draft_len = (plain, None) if name == "plain" else (method, length_of(name))
        groups = [rows] if decode.takes_rows else [[row] for row in rows]
        made = (decode(left_padded(group), draft_len, **settings | changes) for group in groups)
        return [ids[-settings["max_new_tokens"] :] for batch in made for ids in batch.tolist()]

    names = ["plain", *job["lengths"]]
    seconds, equal = dict.fromkeys(names, 0.0), []
    for name in names:
        run(name, job["batches"][0], max_new_tokens=8)
    for number, rows in enumerate(job["batches"]):
        texts = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.process_time()
            texts[name] = run(name, rows)
            seconds[name] += time.process_time() - begin
        for name in job["lengths"]:
            equal += [a == b for a, b in zip(texts[name], texts["plain"], strict=True)]
    ratios = {name: seconds["plain"] / seconds[name] for name in job["lengths"]}
    return {"times_plain": ratios, "equal": [sum(equal), len(equal)]}


def texts(library: str, job: dict[str, Any]) -> dict[str, Any]:
    """Count the rows in the job's batches whose text equals plain greedy decoding.

    `changes` are settings for the library's call only. A nucleus of one token is also greedy.
    """
    if "model_type" in job:
        target = tiny_model(job["model_type"], job["fields"])
        method = LIBRARIES[library](target, None)
    else:
        target = load(job["target"])
        method = adapter(library, job["target"], job["draft"])
    settings, equal = job["settings"], []
    for rows in job["batches"]:
        inputs = left_padded(rows)
        plain = target.generate(**inputs, **settings)
        for name in job["lengths"]:
            made = method(inputs, length_of(name), **settings | job.get("changes", {}))
            equal += [bool(torch.equal(*pair)) for pair in zip(made, plain, strict=True)]
    return {"equal": [sum(equal), len(equal)]}


def memory(library: str, job: dict[str, Any]) -> dict[str, Any]:
    """Measure a process's first long call: its duration, and the peak above earlier memory."""
    target, inputs = load(job["target"]), left_padded(job["batches"][0])
    method, settings = adapter(library, job["target"], job["draft"]), job["settings"]
    method(left_padded([job["batches"][0][0][:64]]), None, **settings)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, begin = kilobytes("VmRSS"), time.process_time()
    made = method(inputs, None, **settings)
    seconds, peak_mb = time.process_time() - begin, (kilobytes("VmHWM") - before) / 1024
    begin = time.process_time()
    equal = [int(torch.equal(made, target.generate(**inputs, **settings))), 1]
    ratio = (time.process_time() - begin) / seconds
    return {"seconds": seconds, "times_plain": {"default": ratio}, "mb": peak_mb, "equal": equal}


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Clock:
    """Clock for the outermost layers, embeddings, norms and heads of all models.

    Global hooks measure the times. Only the time between the second and the last call of the
    target's first layer counts, without the prompt and the start and end of a call.
    """

    def __init__(self, first_layer: torch.nn.Module) -> None:
        self.depth, self.begin, self.inside_s = 0, 0.0, 0.0
        self.marks: list[tuple[float, float]] = []  # time, seconds inside before it
        self._first_layer = first_layer

    def ms_outside(self) -> float:
        (begin, inside_s), (end, inside_at_end_s) = self.marks[1], self.marks[-1]
        return 1e3 * (end - begin - inside_at_end_s + inside_s) / (len(self.marks) - 2)

    def before(self, module: torch.nn.Module, args: Any) -> None:
        if self.depth == 0:
            self.begin = time.process_time()
        if module is self._first_layer:
            self.marks.append((self.begin, self.inside_s))
        self.depth += not type(module).__name__.endswith(("ForCausalLM", "Model"))

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if type(module).__name__.endswith(("ForCausalLM", "Model")):
            return
        self.depth -= 1
        if self.depth == 0:
            self.inside_s += time.process_time() - self.begin


def outside(library: str, job: dict[str, Any]) -> dict[str, Any]:
    """Measure how many ms a round spends outside the layers, embeddings, norms and heads."""
    target, settings = load(job["target"]), job["settings"]
    method, measured = adapter(library, job["target"], job["draft"]), []
    for rows in [job["batches"][0], *job["batches"]]:
        clock = Clock(target.model.layers[0])
        handles = (
            register_module_forward_pre_hook(clock.before),
            register_module_forward_hook(clock.after),
        )
        try:
            method(left_padded(rows), length_of(job["lengths"][0]), **settings)
        finally:
            for handle in handles:
                handle.remove()
        measured.append(clock.ms_outside())
    return {"ms": median(measured[1:])}


def tiny_model(model_type: str, fields: dict[str, Any]) -> PreTrainedModel:
    """Make a random model of a type from its config alone."""
    config_class = CONFIG_MAPPING[model_type]
    known = config_class.__dataclass_fields__.keys() - config_class.attribute_map.keys()
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    config = config_class(**{name: sizes[name] for name in known & sizes.keys()} | fields)
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


JOBS = {function.__name__: function for function in (speed, texts, memory, outside)}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)

    def stop(*_: Any) -> None:
        raise TimeoutError("time limit")

    signal.signal(signal.SIGALRM, stop)
    for line in sys.stdin:
        job = json.loads(line)
        signal.alarm(job["limit_s"])
        torch.manual_seed(0)
        try:
            result = JOBS[job["kind"]](sys.argv[1], job)
        except Exception as error:  # noqa: BLE001  # a library's refusal is a result
            result = {
                "error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            }
        signal.alarm(0)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
