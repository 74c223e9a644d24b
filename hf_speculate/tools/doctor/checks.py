"""Check a device: Triton kernels, CUDA graphs, and the texts of a small pair."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_speculate.options.cuda.kernel_trial import SAMPLE, WARP, WARPED_DRAW, num_different
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.checks.parity import check_parity

KERNELS, GRAPHS, TEXTS = "kernels", "graphs", "texts"
_OPERATIONS = (
    "greedy",
    "rejection with draft sums",
    "point mass",
    "rejection",
    "block",
    "coupled",
    "typical",
)
_VOCAB_SIZE, _HEAD_WIDTH = 512, 16
_SPREAD = 0.2  # standard deviation of the weights; texts must depend on the tokens read
_NOISE = 0.05  # noise in the draft's weights, relative to the spread
_PROMPT_LENS = (24, 21, 9, 1)


class Sizes(NamedTuple):
    """Sizes of the rounds, models and texts in checks."""

    # columns in the kernels' rows; odd, so that rows start at addresses of any alignment
    vocab_size: int = 50_257
    num_draft_tokens: int = 5  # in the kernels' rounds
    kernel_dtype: torch.dtype = torch.bfloat16
    width: int = 256  # hidden width of the models
    max_new_tokens: int = 48
    batch_sizes: tuple[int, ...] = (1, 4)


class WrongResultError(Exception):
    """A result differs from its reference."""


def check_kernels(device: torch.device, sizes: Sizes) -> str:
    """Compare the Triton kernels with their torch references on ordinary and hostile rows."""
    names = *_OPERATIONS, SAMPLE, WARP, WARPED_DRAW
    rounds = [(name, False) for name in names] + [(name, True) for name in _OPERATIONS]
    for name, is_hostile in rounds:
        shape = sizes.vocab_size, sizes.num_draft_tokens
        num_wrong = num_different(name, device, sizes.kernel_dtype, *shape, is_hostile=is_hostile)
        if num_wrong:
            kind = "hostile" if is_hostile else "ordinary"
            raise WrongResultError(
                f"{name} differs from its reference in {num_wrong} numbers on {kind} rows"
            )
    return f"{len(rounds)} rounds agree with their references"


def check_texts(graphs: str, device: torch.device, sizes: Sizes) -> str:
    """Compare greedy texts with plain decoding; they may differ at near-ties.

    If `graphs` is "auto", each call is repeated, since the first call captures and tries the
    graphs. Both models must run from graphs, unless the trial finds that these are not faster.
    Between the calls, other code allocates memory and drops cuBLAS workspaces.
    """
    num_texts, slow = Counter[str](), False
    for dtype in (torch.float32, torch.float16 if device.type == "mps" else torch.bfloat16):
        target, draft = _pair(device, dtype, sizes.width)
        for batch_size in sizes.batch_sizes:
            for _ in range(1 if graphs == "off" else 2):
                stats = SpeculationStats()
                report = check_parity(
                    target,
                    draft,
                    _prompts(device, batch_size),
                    max_new_tokens=sizes.max_new_tokens,
                    verifier_backend="torch",  # kernels have their own check
                    speculation_graphs=graphs,
                    speculation_stats=stats,
                )
                if not report.ok:
                    raise WrongResultError(str(report).replace("\n", "; "))
                num_texts.update(row.verdict for row in report.rows)
                wrong = [reason for reason in stats.fallbacks if "not faster" not in reason]
                if graphs != "off" and wrong:
                    raise WrongResultError("; ".join(wrong))
                slow = slow or bool(stats.fallbacks)
                _disturb(device)
    num_equal, num_all = num_texts["equal"], num_texts.total()
    equal = f"{num_equal} of {num_all} texts equal plain decoding"
    if num_equal < num_all:
        equal += ", the others differ at near-ties"
    return f"{equal}; graphs were not faster" if slow else equal


CHECKS: dict[str, Callable[[torch.device, Sizes], str]] = {
    KERNELS: check_kernels,
    GRAPHS: partial(check_texts, "auto"),
    TEXTS: partial(check_texts, "off"),
}
"""Each returns its findings in words, and raises `WrongResultError` or any other error."""


def _pair(
    device: torch.device, dtype: torch.dtype, width: int
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a small target and a similar draft, which are the same in every call."""
    num_heads = width // _HEAD_WIDTH
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=max(num_heads // 4, 1),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    target: Any = LlamaForCausalLM(config).eval()
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    spread = _SPREAD * (32 / width) ** 0.5
    with torch.no_grad():
        for weight, draft_weight in zip(target.parameters(), draft.parameters(), strict=True):
            if weight.dim() > 1:
                weight.normal_(0.0, spread, generator=generator)
                noise = torch.empty_like(weight).normal_(0.0, _NOISE * spread, generator=generator)
                draft_weight.copy_(weight + noise)
    return target.to(device, dtype), draft.to(device, dtype)


def _prompts(device: torch.device, batch_size: int) -> dict[str, Tensor]:
    """Return left-padded prompts of several lengths."""
    generator = torch.Generator().manual_seed(batch_size)
    texts = [
        torch.randint(3, _VOCAB_SIZE, (length,), generator=generator)
        for length in _PROMPT_LENS[:batch_size]
    ]
    max_len = max(map(len, texts))
    ids = torch.stack([torch.cat([text.new_zeros(max_len - len(text)), text]) for text in texts])
    return {"input_ids": ids.to(device), "attention_mask": (ids > 0).long().to(device)}


def _disturb(device: torch.device) -> None:
    """Allocate memory and drop workspaces, like other code on the device between two calls."""
    garbage = [torch.full((1 << power,), torch.nan, device=device) for power in range(8, 20)]
    side = torch.ones(96, 96, device=device)
    torch.mm(side, side)
    del garbage, side
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # torch.compile does the same; CPU builds lack this function.
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
