"""Texts of a small pair: each token is one that plain decoding might choose too."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from hf_speculate.generation.generate import generate
from hf_speculate.tools.doctor.pair import Pair, make_pair, make_prompts
from hf_speculate.tools.doctor.site import Check, Site, require

# How far below the largest logit of another attention backend a token may lie, by dtype: logits up to 16 are two
# steps of the dtype apart where two kernels round otherwise, and those of float32 sums in another order.
MAX_GAPS = {torch.float32: 1e-3, torch.float16: 0.03125, torch.bfloat16: 0.25}
_DRAFTS: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
# Sampled tokens that can be foreseen: one candidate is left.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 1, "seed": 1},
}


def gap_to_argmax(
    target: PreTrainedModel, inputs: Mapping[str, Tensor], output: Tensor, *, is_simulated: bool = False
) -> float:
    """How far below the largest logit the chosen tokens lie at most, in one forward with math attention."""
    prompt_len, eos = inputs["input_ids"].shape[1], target.generation_config.eos_token_id
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, prompt_len:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), nullcontext() if is_simulated else sdpa_kernel(SDPBackend.MATH):
        logits = target(input_ids=output, attention_mask=mask, position_ids=positions).logits.float()
    chosen = output[:, prompt_len:, None]
    logits = logits[:, prompt_len - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, chosen)[..., 0]  # [B, N]
    if eos is not None:  # what follows an EOS token is padding
        is_end = torch.isin(chosen[..., 0], torch.tensor(eos, device=chosen.device))
        gaps = gaps.masked_fill((is_end.cumsum(1) - is_end.long()) > 0, 0.0)
    return float(gaps.max())


def text_checks(dtypes: tuple[torch.dtype, ...]) -> dict[str, Check]:
    """By name, a check of each way to decode in each dtype."""
    return {f"{way}, {name_of(dtype)}": partial(_check, way, dtype) for dtype in dtypes for way in WAYS}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(pair: Pair, inputs: Mapping[str, Tensor], site: Site, **options: Any) -> Tensor:
    """Token ids [B, T + N] of the target with the draft."""
    arguments: dict[str, Any] = {**inputs, "max_new_tokens": site.max_new_tokens, **_DRAFTS, **options}
    run: Any = generate
    ids: Tensor = run(pair.target, assistant_model=pair.draft, **arguments)
    return ids


def check_text(pair: Pair, inputs: Mapping[str, Tensor], ids: Tensor, site: Site, dtype: torch.dtype) -> float:
    """The gap of a text that should be greedy; raises `WrongResult` if it is too large."""
    gap = gap_to_argmax(pair.target, inputs, ids, is_simulated=site.is_simulated)
    require(gap <= MAX_GAPS[dtype], f"with {len(ids)} rows a token lies {gap:.3g} below the largest logit")
    return gap


def _check(way: str, dtype: torch.dtype, site: Site) -> str:
    pair, gaps = make_pair(site, dtype), []
    target: Any = pair.target
    num_equal = 0
    for batch_size in site.batch_sizes:
        inputs = make_prompts(site, batch_size)
        ids = decode(pair, inputs, site, **WAYS[way], speculation_graphs="off")
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=site.max_new_tokens)
        num_equal += int((ids == plain).all(dim=1).sum())
        gaps.append(check_text(pair, inputs, ids, site, dtype))
    return f"{num_equal} of {sum(site.batch_sizes)} texts are those of plain decoding, largest gap {max(gaps):.3g}"
