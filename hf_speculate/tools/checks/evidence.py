"""Tells rounding from error where two greedy texts part.

Two tokens whose logits nearly tie may change places with the shape of the forward that made them, for kernels sum in
other orders for one row than for several. Such noise is small against the logits, and shrinks as the dtype widens.
A gap that the noise measured at that very place covers is a tie; anything else is an error.
"""

import copy
import inspect
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

_MIN_ULPS = 4  # of a gap that needs no measurement: two logits, each rounded twice
_MAX_ULPS = 64  # of noise that is believed where no wider dtype confirms it
_NOISE_MARGIN = 2.0  # measured noise is one sample of it, and each of two logits has its own
_EXACT_TOLERANCE = 1e-4  # of a logit's magnitude in float64; many models take norms and softmax in float32 there too
_EXACT_BYTES = 2**31  # of a copy in float64 at most


class Evidence(NamedTuple):
    """What forwards of the target say about a place; everything in units of logits.

    `top_gap` is the largest logit over the second largest in the target's dtype, `exact_top_gap` the same in float64
    (None: not computed). `noise` is the most by which the logit of either token moves between a forward of one token
    of one row, and forwards of one and of K+1 tokens of B rows; `bound` is the largest gap that rounding explains.
    """

    verdict: str
    top_gap: float
    exact_top_gap: float | None
    noise: float
    bound: float
    reason: str


class Measured(NamedTuple):
    """What the target's logits at a place are like; `top_gap` and `noise` as in `Evidence`, of one dtype."""

    top_gap: float
    noise: float
    magnitude: float  # of the largest finite logit


class Parting(Protocol):
    """Where two texts part, and how the target's logits there are measured."""

    @property
    def plain_id(self) -> int:
        """The token that follows in the plain text."""

    @property
    def speculative_id(self) -> int:
        """The token that follows in the speculative text."""

    @property
    def gap(self) -> float:
        """The plain token's score over the speculative one's, after all logits processors, in the plain run."""

    def measured_on(self, model: PreTrainedModel) -> Measured:
        """Run forwards.

        Args:
            model: the target or its copy in another dtype; left as it is.
        """


class Place(NamedTuple):
    """Where two texts part that nothing but text was read for.

    Args:
        token_ids: [T] int64, what both texts hold before it, unpadded.
        plain_id, speculative_id: the tokens that follow.
        gap: the plain token's score over the speculative one's, after all logits processors, in the plain run.
        block_len: tokens that a verification scored at once, K+1.
        num_rows: B of the speculative call.
    """

    token_ids: Tensor
    plain_id: int
    speculative_id: int
    gap: float
    block_len: int
    num_rows: int

    @torch.no_grad()
    def measured_on(self, model: PreTrainedModel) -> Measured:
        """See `Parting`; the forwards read text alone."""
        ids = self.token_ids[None].to(model.device)  # [1, T]
        single = _last_logits(model, ids, 1)  # [V]
        rows = ids.expand(self.num_rows, -1)  # [B, T]
        others = torch.stack([_last_logits(model, rows, num) for num in (1, self.block_len)])  # [2, V]
        return measured_by(single, others, (self.plain_id, self.speculative_id))


def judge(model: PreTrainedModel, exact: PreTrainedModel | None, place: Parting) -> Evidence:
    """Say whether rounding explains that two texts part.

    The bound is the larger of 4 units in the last place of the largest logit and twice the noise. Noise of more than
    64 such units counts as 64, unless float64 shows that it is rounding.

    Args:
        model: the target; it is run, and left as it is.
        exact: the target in float64; None: there is none.
        place: where they part.
    """
    exactly = None if exact is None else place.measured_on(exact)
    measured = place.measured_on(model)
    is_confirmed = exactly is not None and exactly.noise <= _EXACT_TOLERANCE * exactly.magnitude
    eps = max(torch.finfo(one).eps for one in (model.dtype, torch.float32))  # scores are float32 at best
    ulp = eps * measured.magnitude
    noise = measured.noise if is_confirmed else min(measured.noise, _MAX_ULPS * ulp)
    bound = max(_MIN_ULPS * ulp, _NOISE_MARGIN * noise)
    verdict, reason = "tie", "the gap is within rounding"
    if exactly is not None and not is_confirmed:
        verdict, reason = "bug", "in float64 too, the target's logits after several tokens are not those after one"
    elif not place.gap <= bound:  # NaN is no tie
        verdict, reason = "bug", "the gap is more than rounding explains"
    exact_top_gap = None if exactly is None else exactly.top_gap
    return Evidence(verdict, measured.top_gap, exact_top_gap, measured.noise, bound, reason)


def exact_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model in float64: itself where it is, else a copy; None where that is no cheap thing.

    Args:
        model: left as it is.
    """
    if model.dtype == torch.float64:
        return model
    num_bytes = 8 * sum(parameter.numel() for parameter in model.parameters())
    is_plain = getattr(model.config, "quantization_config", None) is None and not hasattr(model, "hf_device_map")
    if num_bytes > _EXACT_BYTES or not is_plain or model.device.type not in ("cpu", "cuda"):
        return None
    exact: PreTrainedModel = copy.deepcopy(model).to(torch.float64)  # type: ignore[arg-type]
    return exact


def measured_by(single: Tensor, others: Tensor, token_ids: tuple[int, int]) -> Measured:
    """Compare what forwards of several shapes gave at a place.

    Args:
        single: [V] float64, the logits after one token.
        others: [N, V] float64, the same by other forwards.
        token_ids: the two between which the texts had to choose.
    """
    tokens = torch.tensor(token_ids, device=single.device)
    noise = (single[tokens] - others[:, tokens]).abs().max()
    top = single.topk(2).values
    magnitude = single[single.isfinite()].abs().max()
    return Measured(float(top[0] - top[1]), float(noise), float(magnitude))


def _last_logits(model: PreTrainedModel, token_ids: Tensor, block_len: int) -> Tensor:
    """The first row's logits after the last token, which is fed with `block_len - 1` others over cached states.

    Args:
        model: any decoder.
        token_ids: [B, T] int64.
        block_len: tokens of the last forward.

    Returns:
        [V] float64.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    num_before = max(token_ids.shape[1] - block_len, 0)
    if num_before:
        model(input_ids=token_ids[:, :num_before], past_key_values=cache, use_cache=True, **options)
    output = model(input_ids=token_ids[:, num_before:], past_key_values=cache, use_cache=True, **options)
    logits: Tensor = output.logits[0, -1].double()
    return logits
