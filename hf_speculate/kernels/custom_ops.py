"""Custom operators, which torch.compile calls without tracing their launches."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from ._inputs import Cut, Proposal, Round, TypicalRule, Warp
from .types import NoiseKeys, Sampled, Stream, Verdict

# A copy of this package under another name registers its own operators.
_NAMESPACE = __package__.replace(".", "_")


def _operations(is_triton: bool) -> Any:
    if not is_triton:
        return reference
    from . import kernels  # imports Triton

    return kernels


@torch.library.custom_op(f"{_NAMESPACE}::verify", mutates_args=())
def _verify(
    is_triton: bool,
    verifier: str,
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_lens: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    row_cutoffs: Tensor | None,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    keys: list[Tensor],
    typical_rule: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    run = getattr(_operations(is_triton), verifier)
    round_ = Round(target_logits, draft_token_ids, draft_lens)
    if verifier == "greedy":
        return tuple(run(round_))
    warp = Warp(temperature if temperatures is None else temperatures, row_cutoffs)
    noise_keys = NoiseKeys(*keys) if keys else None
    if verifier == "coupled":
        return tuple(run(round_, warp, noise_keys))
    if verifier == "typical":
        threshold, alpha, epsilon, samples = typical_rule
        return tuple(
            run(round_, warp, TypicalRule(threshold, alpha, epsilon, bool(samples)), noise_keys)
        )
    proposal = None if draft_logits is None else Proposal(draft_logits, draft_logsumexp)
    return tuple(run(round_, warp, proposal, noise_keys))


@_verify.register_fake
def _(
    is_triton: bool, verifier: str, target_logits: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    batch_size, num_positions, _ = target_logits.shape
    counts = [target_logits.new_empty(batch_size, dtype=torch.int32) for _ in range(2)]
    return (
        target_logits.new_empty(batch_size, num_positions, dtype=torch.int64),
        counts[0],
        counts[1],
    )


@torch.library.custom_op(f"{_NAMESPACE}::sample", mutates_args=())
def _sample(
    logits: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    row_cutoffs: Tensor | None,
    keys: list[Tensor],
    stream: int,
) -> tuple[Tensor, Tensor]:
    warp = Warp(temperature if temperatures is None else temperatures, row_cutoffs)
    return tuple(_operations(True).sample(logits, warp, NoiseKeys(*keys), Stream(stream)))


@_sample.register_fake
def _(logits: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0], dtype=torch.int64), logits.new_empty(
        logits.shape[0], dtype=torch.float32
    )


@torch.library.custom_op(f"{_NAMESPACE}::cut", mutates_args=())
def _cut(logits: Tensor, temperature: float, top_k: int, top_p: float, most_below: float) -> Tensor:
    cut: Tensor = _operations(True).cut(logits, temperature, Cut(top_k, top_p, most_below))
    return cut


@_cut.register_fake
def _(logits: Tensor, *args: object) -> Tensor:
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


def _split(warp: Warp) -> tuple[float, Tensor | None, Tensor | None]:
    """Split into the temperature as a float, the temperature as a tensor, and the cutoffs."""
    temperature, row_cutoffs = warp
    if isinstance(temperature, Tensor):
        return 1.0, temperature, row_cutoffs
    return float(temperature), None, row_cutoffs


class CustomOperations(NamedTuple):
    """Operations inside a compiled function.

    The torch reference of `sample` and `cut` is traced, so that the compiler fuses it with the
    surrounding code. The reference of the verifiers writes into parts of tensors and cannot be
    traced as a whole.
    """

    is_triton: bool

    def _verdict(
        self,
        verifier: str,
        round_: Round,
        warp: Warp,
        proposal: Proposal | None,
        keys: NoiseKeys | None,
        typical_rule: list[float] | None = None,
    ) -> Verdict:
        draft_logits, draft_logsumexp = (None, None) if proposal is None else proposal
        noise_keys = [] if keys is None else list(keys)
        return Verdict(
            *_verify(
                self.is_triton,
                verifier,
                *round_,
                *_split(warp),
                draft_logits,
                draft_logsumexp,
                noise_keys,
                typical_rule or [],
            )
        )

    def greedy(self, round_: Round) -> Verdict:
        """See `verify_greedy`."""
        return self._verdict("greedy", round_, Warp(), None, None)

    def reject(
        self, round_: Round, warp: Warp, proposal: Proposal | None, keys: NoiseKeys
    ) -> Verdict:
        """See `verify_rejection`."""
        return self._verdict("reject", round_, warp, proposal, keys)

    def reject_and_test(
        self, round_: Round, proposal: Proposal, keys: NoiseKeys
    ) -> tuple[Verdict, Tensor]:
        """Run outside the graph, since the counts are updated in place.

        `chain_speculative_sampling` is the only caller and is never compiled in pieces.
        """
        reject_and_test = torch.compiler.disable(_operations(self.is_triton).reject_and_test)
        result: tuple[Verdict, Tensor] = reject_and_test(round_, proposal, keys)
        return result

    def typical(
        self, round_: Round, warp: Warp, rule: TypicalRule, keys: NoiseKeys | None
    ) -> Verdict:
        """See `verify_typical`."""
        values = [rule.threshold, rule.alpha, rule.entropy_epsilon, float(rule.samples)]
        return self._verdict("typical", round_, warp, None, keys, values)

    def block(self, round_: Round, warp: Warp, proposal: Proposal, keys: NoiseKeys) -> Verdict:
        """See `verify_block`."""
        return self._verdict("block", round_, warp, proposal, keys)

    def coupled(self, round_: Round, warp: Warp, keys: NoiseKeys) -> Verdict:
        """See `verify_coupled`."""
        return self._verdict("coupled", round_, warp, None, keys)

    def sample(self, logits: Tensor, warp: Warp, keys: NoiseKeys, stream: Stream) -> Sampled:
        """See `kernels.sample`."""
        if not self.is_triton:
            return reference.sample(logits, warp, keys, stream)
        return Sampled(*_sample(logits, *_split(warp), list(keys), int(stream)))

    def cut(self, logits: Tensor, temperature: float, rule: Cut) -> Tensor:
        """See `warp_logits`."""
        if not self.is_triton:
            return reference.cut(logits, temperature, rule)
        cut: Tensor = _cut(logits, temperature, *rule)
        return cut
