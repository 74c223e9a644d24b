"""The self-test, which compares a model's multi-token forwards with plain decoding.

It runs once per type of call, for models outside `hf_speculate.models.quirks.TESTED_TYPES` and for
models with foreign code such as hooks. Models of a type in the table are tested once per class if
the version of transformers is untested. First, plain decoding generates `NUM_TOKENS` tokens, or as
many as a round verifies if there is foreign code. After the same prompt, the model then reads the
same tokens in one forward, is rolled back, and reads the last of them again.

The difference of a row is the mean, over its positions, of |ours - plain| / |plain - mean(plain)|,
with the Euclidean norm over the vocabulary. An offset common to all logits at a position is
ignored. The round-off of one layer is close to the resolution of the dtype and grows with depth. A
wrong position or mask gives 0.05 to 1.5.
"""

import copy
import logging
import math
from collections.abc import Hashable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.compat import PlainSteps, plain_steps
from hf_speculate.draft.source import DraftSource
from hf_speculate.engine.call import Call
from hf_speculate.engine.model_plan import plan_target
from hf_speculate.engine.plan import attention_of, counts_by_column
from hf_speculate.errors import SpeculateError, UnsupportedModelError, counted
from hf_speculate.model_state import model_state
from hf_speculate.models.attention_names import folded_attention_for
from hf_speculate.models.cache_kinds import has_holes
from hf_speculate.models.language_model import LanguageModel, cache_name, dtype_of
from hf_speculate.models.quirks import is_known_type, token_without_position

LOGGER = logging.getLogger("hf_speculate")
MAX_TOKENS = 16  # largest number of tokens per forward
_MAX_SETS = 16  # largest number of foreign-code sets with stored results
# tokens read together; the third and fourth, or second and third, are read again after a rollback
NUM_TOKENS = 4
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
_LARGEST_LOGIT = 1e30  # larger values stand for -inf


def check_decoding(call: Call, source: DraftSource) -> str:
    """Compare a target of unknown type with plain decoding; return the result as text.

    Each kind of call is measured once.

    Raises:
        UnsupportedModelError: the difference exceeds the tolerance.
    """
    model, num_tokens = call.target, min(NUM_TOKENS, call.max_new_tokens - 1)
    if num_tokens < 1:
        return ""
    if model.training:  # dropout differs between forwards
        return "skipped, for the model is in training mode"
    situation, padding = _situation(call, num_tokens)
    # for a known type, only the version is new
    owner = type(model) if is_known_type(model) else model
    differences: dict[Hashable, float] = model_state(owner).get(check_decoding, dict)
    difference = differences.get(situation, torch.nan)
    # all ranks must run the same number of forwards
    if call.ranks.max(int(math.isnan(difference))):
        difference = _measure(call, num_tokens, source)
        differences[situation] = difference = call.ranks.broadcast_number(difference)
        LOGGER.debug(
            "self-test of %s in %s: difference %.2g", type(model).__name__, situation, difference
        )
    dtype = _dtype(model)
    tolerance = TOLERANCES.get(dtype, max(TOLERANCES.values()))
    has_failed = not difference <= tolerance
    if call.ranks.max(int(has_failed)):
        rows = counted(call.batch_size, "row")
        got = f"a difference of {difference:.2g} with {padding} padding and {rows}"
        raise UnsupportedModelError(
            f"{type(model).__name__} must give the same logits for several tokens in one forward "
            "as one by one, to "
            f"{tolerance:g} of their spread in {str(dtype).removeprefix('torch.')}, got "
            f"{got if has_failed else 'another difference on another rank'}; {source.hint}"
        )
    return f"passed, difference {difference:.1e} of {tolerance:g} allowed"


def foreign_code_obstacle(call: Call, source: DraftSource) -> str:
    """Return how drafting would change the text with the target's foreign code; empty if not.

    Each set of foreign code is compared once; its hooks run in the comparison's forwards.
    """
    model = call.target
    num_tokens = min(
        max(NUM_TOKENS, call.config.max_draft_tokens + 1), MAX_TOKENS, call.max_new_tokens - 1
    )
    if num_tokens < 1:
        return ""
    by_code: dict[Hashable, dict[Hashable, str]] = model_state(model).get(
        foreign_code_obstacle, dict
    )
    obstacles = by_code.setdefault(call.foreign_code, {})
    situation, _ = _situation(call, num_tokens)
    # all ranks must run the same number of forwards
    if call.ranks.max(int(situation not in obstacles)):
        obstacles[situation] = _compared(call, num_tokens, source)
        while len(by_code) > _MAX_SETS:
            del by_code[next(iter(by_code))]
    obstacle = obstacles[situation]
    return obstacle or (
        "the target of another rank differs" if call.ranks.max(int(bool(obstacle))) else ""
    )


def _compared(call: Call, num_tokens: int, source: DraftSource) -> str:
    """Return how a target's forwards differ from its plain steps; empty if they agree."""
    dtype = _dtype(call.target)
    tolerance = TOLERANCES.get(dtype, max(TOLERANCES.values()))
    try:
        difference = _measure(call, num_tokens, source)
    except SpeculateError as error:
        return str(error).partition("; ")[0]
    if difference <= tolerance:
        return ""
    return (
        "several tokens in one forward give other logits than one by one, a difference of "
        f"{difference:.2g} where "
        f"{tolerance:g} is allowed"
    )


def _situation(call: Call, num_tokens: int) -> tuple[Hashable, str]:
    """Return a key shared by calls that decode alike, and the kind of padding in their prompts."""
    model, mask = call.target, call.prompts.attention_mask
    padding = "no" if mask is None else "inner" if has_holes(mask) else "left"
    model_type, cache_choice = (
        (attention_of(model), _dtype(model)),
        (call.config.speculation_cache, call.is_cache_passed),
    )
    prompt_type = num_tokens, call.batch_size > 1, padding, *call.target_inputs.prompt_names
    return (model_type, cache_choice, prompt_type, call.foreign_code), padding


def relative_difference(plain: Tensor, ours: Tensor) -> float:
    """Return the largest difference over the rows of [B, N, V], as defined above.

    The result is inf if only one of the tensors is finite in some entry, and 0 if no entry is
    finite.
    """
    plain, ours = plain.double(), ours.to(plain.device).double()
    is_number = plain.isfinite() & (plain.abs() < _LARGEST_LOGIT)
    if not torch.equal(is_number, ours.isfinite() & (ours.abs() < _LARGEST_LOGIT)):
        return torch.inf
    num_finite = is_number.sum(-1, keepdim=True).clamp_min(1)

    def centred(values: Tensor) -> Tensor:
        values = values.where(is_number, 0)
        return (values - values.sum(-1, keepdim=True) / num_finite).where(is_number, 0)

    norms = torch.maximum(
        centred(plain).norm(dim=-1), 1e-3 * plain.where(is_number, 0).norm(dim=-1)
    )
    distances = centred(ours - plain).norm(dim=-1) / norms.clamp_min(1e-30)  # [B, N]
    return float(distances.mean(dim=1).max())


def _measure(call: Call, num_tokens: int, source: DraftSource) -> float:
    """Return the difference between plain steps and our forwards, on copies of the cache."""
    model = call.target
    with _same_randomness(model):
        plain_kwargs = {**call.model_kwargs, cache_name(model): copy.deepcopy(call.cache)}
        plain = plain_steps(
            model, call.prompts.input_ids, call.generation_config, plain_kwargs, num_tokens
        )
    del plain_kwargs  # free the first cache before the second is made
    ours = replace(
        call, cache=copy.deepcopy(call.cache), target_inputs=copy.copy(call.target_inputs)
    )
    folded = folded_attention_for([model])
    try:
        cache = plan_target(ours, call.config, source).make_cache(call.batch_size)
        with torch.no_grad(), _same_randomness(model), folded, ExitStack() as stack:
            stack.callback(cache.release)
            return _difference_to(plain, ours, cache, num_tokens)
    except (SpeculateError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} must read several tokens in one forward as it reads them one "
            "by one, got "
            f"{type(error).__name__}: {error}; {source.hint}"
        ) from error


def _difference_to(plain: PlainSteps, call: Call, cache: KVCache, num_tokens: int) -> float:
    model, batch_size, device = call.target, call.batch_size, call.prompts.input_ids.device
    is_watched = bool(call.foreign_code)
    language_model = LanguageModel(
        model, call.max_position, extra_inputs=call.target_inputs, is_watched=is_watched
    )
    for chunk in call.prompts.query_ids.split(
        call.prefill_chunk_size or call.prompts.query_ids.shape[1], dim=1
    ):
        logits = language_model.forward(chunk, cache, logits_to_keep=1)
    cache.begin_recording()
    num_tokens = min(num_tokens, _num_read_together(plain.token_ids, token_without_position(model)))
    token_ids = plain.token_ids[:, :num_tokens]
    block = language_model.forward(token_ids, cache, logits_to_keep=num_tokens)
    together = torch.cat([logits, block], dim=1)  # [B, N+1, V]
    differences = [relative_difference(plain.logits[:, : num_tokens + 1], together)]
    if num_tokens > 2:
        num_reread = num_tokens - 2
        is_lock_step = counts_by_column(model) or batch_size == 1
        counts = [1 if is_lock_step else 1 + row % 2 for row in range(batch_size)]
        num_kept = torch.tensor(counts, device="cpu")  # [B] number of tokens kept in each row
        cache.crop(num_tokens - num_kept)
        columns = (num_kept[:, None] + torch.arange(num_reread, device="cpu")).to(device)  # [B, Q]
        again = language_model.forward(
            token_ids.gather(1, columns), cache, logits_to_keep=num_reread
        )
        index = (columns + 1)[..., None].expand(-1, -1, plain.logits.shape[2])
        differences.append(
            relative_difference(plain.logits.gather(1, index.to(plain.logits.device)), again)
        )
    return max(differences)


def _num_read_together(token_ids: Tensor, no_position: int | None) -> int:
    """Return how many of the first tokens [B, N] may be read in one forward, at least 1."""
    ends = (
        (token_ids == no_position).any(0).nonzero()[:, 0].tolist()
        if no_position is not None
        else []
    )
    return int(ends[0]) + 1 if ends else token_ids.shape[1]


def _same_randomness(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Restore torch's generators on exit, since some encoders draw noise."""
    device = model.device
    devices = [] if device.type in ("cpu", "meta") else [device.index or 0]
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the model's compute dtype; bfloat16 if float32 matrix products may be less precise."""
    device_type = model.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    is_coarse = (
        dtype_of(model) == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    )
    return torch.bfloat16 if is_coarse else dtype_of(model)
