"""Decodes questions with plain, assisted and speculative generation, then prints what was measured.

    python examples/demo.py
    python examples/demo.py --tiny --prompts 8 --max-new-tokens 64 --num-assistant-tokens 5

The model is SmolLM2-135M-Instruct with its draft head; transformers' assisted generation, which takes no such head,
drafts by prompt lookup. With --tiny it is the bundled 7 M pair, and both draft with its smaller model; one more line
drafts with the EAGLE-3 head in `examples/heads`.

A pass decodes the next prompt alone and the next eight together with every method, in alternating order; passes go on
until they or the time are used up. The table holds medians over passes. The speed-up is over plain `generate()` of the
same kind (greedy or sampled) on the same prompts in the same pass. transformers decodes a batch row by row.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_speculate
from demo_report import Method, Tally, print_summary, print_table, print_text
from models import EAGLE3, PAIR, Models, load_models, read_questions

EXAMPLES = Path(__file__).resolve().parent
BATCH_SIZE = 8
MAX_PROMPT_TOKENS = 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
GREEDY = {"do_sample": False}
BAR = "{desc} {percentage:3.0f}% |{bar:20}| {n_fmt} of at most {total_fmt} s{postfix}"
OURS_GREEDY = Method("hf_speculate", "greedy", 1, False)


@dataclass
class Pair:
    """A target in one dtype, and the options of `generate()` that say what drafts for it."""

    target: PreTrainedModel
    drafting: dict[str, Any]  # ours
    assisted: dict[str, Any]  # of transformers' assisted generation
    num_assistant_tokens: int
    head: hf_speculate.DraftHead | None = None  # drafts for lines of their own
    num_target_calls: int = 0

    def count_call(self, *_: Any) -> None:
        self.num_target_calls += 1


def methods(has_head: bool) -> list[Method]:
    """Every line of the table; transformers' assisted generation decodes a batch row by row."""
    lines = []
    for batch_size in (1, BATCH_SIZE):
        for mode, verifiers in (("greedy", ["greedy"]), ("sampled", ["rejection", "typical"])):
            is_sampled = mode == "sampled"
            lines.append(Method("plain", mode, batch_size, is_sampled))
            if batch_size == 1 or not is_sampled:
                assisted = f"assisted {mode}" if batch_size == 1 else "assisted, row by row"
                lines.append(Method("transformers", assisted, batch_size, is_sampled))
            lines += [Method("hf_speculate", verifier, batch_size, is_sampled) for verifier in verifiers]
            if has_head and not is_sampled:
                lines.append(Method("hf_speculate", "greedy", batch_size, is_sampled, has_head=True))
    return lines


def load_pair(folder: Path, dtype: torch.dtype, num_assistant_tokens: int) -> Pair:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=dtype).eval()
    # It shares the draft's weights and always drafts `num_assistant_tokens`.
    fixed_draft = copy.copy(draft)
    fixed_draft.generation_config = copy.deepcopy(draft.generation_config)
    fixed_draft.generation_config.update(
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    drafting, assisted = ({"assistant_model": model} for model in (draft, fixed_draft))
    head = hf_speculate.load_drafter(EAGLE3, target) if folder == PAIR else None
    return counted(Pair(target, drafting, assisted, num_assistant_tokens, head))


def as_pair(models: Models, num_assistant_tokens: int) -> Pair:
    """The examples' model with its draft head, which transformers does not take."""
    target = hf_speculate.disable(models.target)  # plain decoding and transformers' own drafts are measured too
    assisted = {"prompt_lookup_num_tokens": num_assistant_tokens}
    return counted(Pair(target, models.options, assisted, num_assistant_tokens))


def counted(pair: Pair) -> Pair:
    pair.target.register_forward_hook(pair.count_call)
    return pair


def encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str], batch_size: int) -> list[dict[str, Tensor]]:
    """Left-padded batches; of a long prompt the last `MAX_PROMPT_TOKENS` tokens are kept."""
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    how = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": MAX_PROMPT_TOKENS}
    batches = []
    for start in range(0, len(prompts), batch_size):
        encoded = tokenizer(prompts[start : start + batch_size], **how)
        batches.append({"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]})
    return batches


def decode(
    method: Method, pair: Pair, inputs: dict[str, Tensor], max_new_tokens: int, seed: int, callback: Any = None
) -> tuple[Tensor, hf_speculate.SpeculationStats | None]:
    """One `generate()` call: the new tokens [B, N] and, of ours, what it counted."""
    fields = {**inputs, **(SAMPLING if method.is_sampled else GREEDY), "max_new_tokens": max_new_tokens}
    stats = None
    if method.engine == "hf_speculate":
        stats = hf_speculate.SpeculationStats()
        sequences = hf_speculate.generate(
            pair.target,
            **fields,
            **({"assistant_model": pair.head} if method.has_head else pair.drafting),
            verifier=method.mode,
            num_assistant_tokens=pair.num_assistant_tokens,
            num_assistant_tokens_schedule="constant",
            seed=seed,
            speculation_stats=stats,
            speculation_callback=callback,
        )
    elif method.engine == "transformers":
        torch.manual_seed(seed)
        sequences = assist_row_by_row(pair, fields)
    else:
        torch.manual_seed(seed)
        sequences = pair.target.generate(**fields)
    return sequences[:, inputs["input_ids"].shape[1] :], stats


def assist_row_by_row(pair: Pair, fields: dict[str, Any]) -> Tensor:
    """Transformers' assisted generation, which takes one row; shorter rows are padded with EOS."""
    names = ("input_ids", "attention_mask")
    eos = pair.target.generation_config.eos_token_id
    rows = [
        pair.target.generate(**{**fields, **{name: fields[name][row : row + 1] for name in names}}, **pair.assisted)[0]
        for row in range(len(fields["input_ids"]))
    ]
    return pad_sequence(rows, batch_first=True, padding_value=(eos[0] if isinstance(eos, list) else eos) or 0)


def count_tokens(token_ids: Tensor, eos_token_id: int | list[int] | None) -> int:
    """Tokens [B, N] up to and with each row's first EOS."""
    if eos_token_id is None:
        return token_ids.numel()
    has_ended = torch.isin(token_ids, torch.as_tensor(eos_token_id)).int().cumsum(1)  # [B, N]
    is_counted = torch.cat([torch.ones_like(has_ended[:, :1]), has_ended[:, :-1] == 0], dim=1)  # [B, N]
    return int(is_counted.sum())


def run_method(
    method: Method, pair: Pair, inputs: dict[str, Tensor], max_new_tokens: int, seed: int, tally: Tally
) -> None:
    """Decode one batch and add what was seen to `tally`."""
    pair.num_target_calls = 0
    begin = time.perf_counter()
    token_ids, stats = decode(method, pair, inputs, max_new_tokens, seed)
    seconds = time.perf_counter() - begin
    num_tokens = count_tokens(token_ids, pair.target.generation_config.eos_token_id)
    tally.tokens_per_s.append(num_tokens / seconds)
    tally.num_tokens += num_tokens
    tally.num_target_calls += pair.num_target_calls
    if stats is not None:
        tally.num_rounds += stats.num_rounds
        tally.num_emitted += stats.num_emitted
        tally.num_verified += stats.num_verified
        tally.num_accepted += stats.num_accepted


def measure(pair: Pair, batches: dict[int, list[dict[str, Tensor]]], args: argparse.Namespace) -> dict[Method, Tally]:
    """Passes over all methods, each on the next batch of its size, until they or the time are used up; at least one."""
    lines = methods(pair.head is not None)
    for method in tqdm(lines, desc="warming up", leave=False):
        decode(method, pair, batches[method.batch_size][0], 8, seed=0)
    tallies = {method: Tally() for method in lines}
    begin = time.perf_counter()
    with tqdm(total=round(args.budget_s), desc="decoding", bar_format=BAR) as bar:
        for index in range(args.passes):
            for method in lines if index % 2 == 0 else reversed(lines):
                bar.set_postfix_str(f"{method.batch_size} x {method.name}", refresh=False)
                inputs = batches[method.batch_size][index % len(batches[method.batch_size])]
                run_method(method, pair, inputs, args.max_new_tokens, index, tallies[method])
                bar.update(min(round(time.perf_counter() - begin), bar.total) - bar.n)
            elapsed_s = time.perf_counter() - begin
            if elapsed_s + elapsed_s / (index + 1) > args.budget_s:
                break
    return tallies


def compare_greedy(pair: Pair, batches: list[dict[str, Tensor]], max_new_tokens: int) -> Iterator[str]:
    """Say how many greedy rows equal plain `generate()`, with the logit gap where one first differs."""
    num_equal, num_rows, notes = 0, 0, []
    for inputs in batches:
        fields = {**inputs, **GREEDY, "max_new_tokens": max_new_tokens}
        plain = pair.target.generate(**fields, return_dict_in_generate=True, output_logits=True)
        expected = plain.sequences[:, inputs["input_ids"].shape[1] :]
        ours, _ = decode(Method("hf_speculate", "greedy", len(expected), False), pair, inputs, max_new_tokens, seed=0)
        for row, (theirs, mine) in enumerate(zip(expected, ours, strict=True)):
            num_rows += 1
            num_common = min(len(theirs), len(mine))
            different = (theirs[:num_common] != mine[:num_common]).nonzero()
            if len(different) == 0:
                num_equal += 1
                continue
            position = int(different[0])
            top = plain.logits[position][row].float().topk(2).values
            notes.append(
                f"prompt {num_rows}: first difference at token {position}, top-1/top-2 gap {top[0] - top[1]:.2g}"
            )
    yield f"{num_equal} of {num_rows} greedy texts are identical to plain generate()"
    yield from notes


def print_texts(pair: Pair, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_new_tokens: int) -> None:
    print("\nGenerated text, with the drafted tokens that were accepted in green:")
    for prompt, inputs in zip(prompts, encode(tokenizer, prompts, 1), strict=True):
        reports: list[hf_speculate.RoundReport] = []
        token_ids, _ = decode(OURS_GREEDY, pair, inputs, max_new_tokens, seed=0, callback=reports.append)
        rounds = [(report.num_accepted[0], report.num_emitted[0]) for report in reports]
        print_text(tokenizer, prompt, token_ids[0].tolist(), rounds)


def faster_dtype(pairs: dict[str, Pair], inputs: dict[str, Tensor]) -> str:
    """The dtype in which plain greedy decoding takes less time, by one short run each after a warm-up."""
    seconds = {}
    for name, num_tokens in itertools.product(pairs, (4, 24)):
        begin = time.perf_counter()
        decode(Method("plain", "greedy", 1, False), pairs[name], inputs, num_tokens, seed=0)
        seconds[name] = time.perf_counter() - begin
    return min(seconds, key=seconds.__getitem__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="decode with the bundled 7 M pair")
    parser.add_argument("--pair", type=Path, help="decode with the pair in this folder's target/ and draft/")
    parser.add_argument("--prompts-file", type=Path, help="prompts.jsonl for a pair, else questions.jsonl")
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-assistant-tokens", type=int, default=5, help="K, the same for every engine")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: faster for plain decoding")
    parser.add_argument("--passes", type=int, default=24)
    parser.add_argument("--budget-s", type=float, default=75.0, help="begin no pass that would end after this")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[dict[str, Pair], PreTrainedTokenizerBase, list[str]]:
    """The models by dtype, the tokenizer, and the prompts."""
    num, folder = args.num_assistant_tokens, args.pair or PAIR
    if args.pair is None and not args.tiny:
        models = load_models(dtype=torch.float32)
        if not models.is_tiny:
            halved = load_models(dtype=torch.bfloat16)
            pairs = {"float32": as_pair(models, num), "bfloat16": as_pair(halved, num)}
            questions = read_questions(args.prompts_file or EXAMPLES / "questions.jsonl", args.prompts)
            return pairs, models.tokenizer, models.prompts(questions)
    if not (folder / "target").is_dir():
        raise SystemExit(f"{folder / 'target'} is missing; make it with examples/train_pair.py, or name another --pair")
    pairs = {name: load_pair(folder, dtype, num) for name, dtype in DTYPES.items()}
    prompts = read_questions(args.prompts_file or EXAMPLES / "prompts.jsonl", args.prompts)
    return pairs, AutoTokenizer.from_pretrained(folder / "target"), prompts


def main() -> None:
    args = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pairs, tokenizer, prompts = load(args)
    batches = {batch_size: encode(tokenizer, prompts, batch_size) for batch_size in (1, BATCH_SIZE)}
    dtype = faster_dtype(pairs, batches[1][0]) if args.dtype == "auto" else args.dtype
    print(
        f"{len(prompts)} prompts, {args.max_new_tokens} new tokens, K = {args.num_assistant_tokens} constant, {dtype}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    tallies = measure(pairs[dtype], batches, args)
    print_texts(pairs[dtype], tokenizer, prompts[:2], args.max_new_tokens)
    print_table(tallies)
    for name, pair in pairs.items():
        for line in compare_greedy(pair, batches[BATCH_SIZE], args.max_new_tokens):
            print(f"{name}, {BATCH_SIZE} rows: {line}")
    print_summary(tallies)


if __name__ == "__main__":
    main()
