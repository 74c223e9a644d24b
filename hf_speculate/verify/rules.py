"""The acceptance rules; each verifier runs the kernel of its rule.

In the formulas p is the target's distribution, q the one that a drafted token x was sampled from, u a uniform number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_speculate.triton_kernels import verify_block, verify_coupled, verify_greedy, verify_rejection, verify_typical
from hf_speculate.types import DraftOut, NoiseKeys, Verdict


@dataclass(frozen=True)
class GreedyVerifier:
    """Greedy verification, lossless for `do_sample=False`: a drafted token is accepted if it is the target's argmax.

    The token after the accepted ones is the argmax at their position. Ties go to the lowest id.
    """

    backend: str = "auto"  # of the kernel

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        return verify_greedy(target_logits, draft.token_ids, draft_lens=draft.lens, backend=self.backend)


@dataclass(frozen=True)
class RejectionVerifier:
    """Rejection sampling, lossless verification of sampled drafts and point masses.

    Token x is accepted if u < min(1, p(x) / q(x)). After the first rejection a token is sampled from the residual
    max(p - q, 0), normalised; after a full acceptance, from p at the bonus position. For a point mass, x is accepted if
    u < p(x), and the residual is p without x.

    Source:
        Leviathan et al. (arXiv:2211.17192), algorithm 1; Chen et al. (arXiv:2302.01318), algorithm 2.
    """

    backend: str = "auto"  # of the kernel
    kernel: ClassVar[Callable[..., Verdict]] = staticmethod(verify_rejection)

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        return self.kernel(
            target_logits,
            draft.token_ids,
            draft.token_logits,
            keys=keys,
            draft_lens=draft.lens,
            draft_logsumexp=draft.logsumexp,
            backend=self.backend,
        )


class BlockVerifier(RejectionVerifier):
    """Block verification, lossless: accepts the longest prefix of a draft that a joint test allows.

    The weight of a prefix of i tokens is w_i = min(1, w_{i-1} * p(x_i) / q(x_i)), w_0 = 1. Prefix i < K passes with
    probability S_i / (S_i + 1 - w_i), S_i being the mass of max(w_i * p - q, 0) at the next position, and the whole
    draft with probability w_K; the longest prefix that passes is accepted. The token after it is sampled from the
    residual max(w_i * p - q, 0), normalised; after a full acceptance, from p at the bonus position. On average at least
    as many tokens are accepted as by rejection, for point masses the same.

    Source:
        Sun et al. (arXiv:2403.10444), algorithm 2.
    """

    kernel = staticmethod(verify_block)


@dataclass(frozen=True)
class CoupledVerifier:
    """Coupled verification, lossless: a drafted token is accepted if the target samples the same with the same noise.

    The target's token is the winner of an exponential race on p, with noise keyed by row seed, position and token id.
    Drafts are sampled with the same noise, so that they agree often. The output depends on row seed and prompt only,
    whatever is drafted.

    Source:
        Daliri et al. (arXiv:2408.07978).
    """

    backend: str = "auto"  # of the kernel

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        return verify_coupled(target_logits, draft.token_ids, keys=keys, draft_lens=draft.lens, backend=self.backend)


@dataclass(frozen=True)
class TypicalVerifier:
    """Typical acceptance, lossy: the probability that a token needs falls with the target's entropy.

    With the entropy H(p) in nats, token x is accepted if p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))).
    The token after the accepted ones is the argmax of p or a sample from p at their position.

    Source:
        Cai et al. (arXiv:2401.10774), section 3.3.1.
    """

    posterior_threshold: float = 0.09  # in (0, 1)
    posterior_alpha: float = 0.3  # > 0
    entropy_epsilon: float = 0.0  # added inside the entropy's logarithm, >= 0
    correction: str = "argmax"  # "argmax" or "sample", how the token after the accepted ones is chosen
    backend: str = "auto"  # of the kernel

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        return verify_typical(
            target_logits,
            draft.token_ids,
            posterior_threshold=self.posterior_threshold,
            posterior_alpha=self.posterior_alpha,
            correction=self.correction,
            entropy_epsilon=self.entropy_epsilon,
            keys=keys,
            draft_lens=draft.lens,
            backend=self.backend,
        )
