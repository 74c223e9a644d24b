"""The torch twin of every operation: the definition of what the kernels compute, and the path on a CPU.

Vectorised over rows and positions, without a wait for the host, without gradients. Logits go to float32 first;
nothing is added to a probability and nothing is divided to compare. A row that holds a NaN, a +inf, or only -inf has
no law: the chain ends there, the emitted token is some token in [0, V), and `Status` says why. Rows past
`draft_lens[b]` do not count: row `draft_lens[b]` is that chain's bonus row.
"""

import torch
from torch import Tensor

from ._checks import check_backend, check_draft, check_keys, check_law, check_logits, check_round
from ._rejection import reject
from ._rows import first_max, law_status, pick_rows, race, row_masses, to_law
from ._typical import TypicalRule, accept_typical
from ._walk import Chain, choose_rows, find_end, make_chain, make_verdict
from .errors import ConfigError
from .types import NoiseKeys, Sampled, Stream, Verdict

CORRECTIONS = ("argmax", "sample")


def _greedy(target_logits: Tensor, chain: Chain) -> Verdict:
    best = first_max(target_logits)  # [B, K+1]
    has_law = best.values.abs() < torch.inf
    end = find_end(chain, (best.indices[:, :-1] == chain.token_ids) & has_law[:, :-1])
    positions = end.num_accepted.unsqueeze(-1)
    final_ids = best.indices.gather(1, positions).squeeze(-1)
    return make_verdict(chain, end, final_ids, law_status(best.values.gather(1, positions).squeeze(-1)))


@torch.no_grad()
def verify_greedy(
    target_logits: Tensor, draft_token_ids: Tensor, *, draft_lens: Tensor | None = None, backend: str = "auto"
) -> Verdict:
    """Keep drafted tokens while each is the target's argmax (ties: the lowest index), then emit that argmax.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        draft_lens: [B] int32 or int64, how many drafted tokens count; None: all.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict, [B, K+1] ids padded with -1.

    Raises:
        ConfigError: an unknown backend.
        KernelUnavailableError: backend="triton".
        ShapeError: a shape or dtype that does not fit.
    """
    check_backend(backend)
    check_round(target_logits, draft_token_ids, draft_lens)
    return _greedy(target_logits, make_chain(draft_token_ids, draft_lens, target_logits.shape[-1]))


@torch.no_grad()
def verify_rejection(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None = None,
    *,
    keys: NoiseKeys,
    draft_lens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    backend: str = "auto",
) -> Verdict:
    """Keep drafted tokens with probability min(1, target / draft), so that the emitted tokens follow the target's law.

    At the first refusal the next token is drawn from the positive part of target minus draft, after the last
    accepted token from the bonus row. Where that positive part is empty, the drafted id is not in [0, V), or the
    draft's row has no law, the token is drawn from the target's row.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64, drawn from `draft_logits`.
        draft_logits: [B, K, V], final: neither temperature nor cutoffs act on them. None: each token was proposed
            with certainty (a point mass).
        keys: [B] int64 each; `positions` is that of the first drafted token. Streams ACCEPT and CORRECTION.
        draft_lens: [B] int32 or int64, how many drafted tokens count; None: all.
        temperature: divides the target's logits in float32; a float or [B], >= 0. 0 decides as `verify_greedy`.
        row_cutoffs: [B, K+1], after the temperature; the target's entries below are dropped.
        draft_logsumexp: [B, K] float32, as `sample` gave it; saves a pass over `draft_logits`, changes nothing.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict, [B, K+1] ids padded with -1.

    Raises:
        ConfigError: an unknown backend, a bad temperature, or `draft_logsumexp` without `draft_logits`.
        KernelUnavailableError: backend="triton".
        ShapeError: a shape or dtype that does not fit.

    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318, algorithm 2.
    """
    check_backend(backend)
    check_round(target_logits, draft_token_ids, draft_lens)
    check_draft(target_logits, draft_logits, draft_logsumexp)
    check_law(target_logits.shape[:2], "B, K+1", temperature, row_cutoffs)
    check_keys(keys, target_logits.shape[0])
    chain = make_chain(draft_token_ids, draft_lens, target_logits.shape[-1])
    if not isinstance(temperature, Tensor) and temperature == 0.0:
        return _greedy(target_logits, chain)
    law = to_law(target_logits, temperature, row_cutoffs)
    verdict = reject(law, chain, draft_logits, draft_logsumexp, keys)
    if isinstance(temperature, Tensor):
        return choose_rows(temperature == 0, _greedy(target_logits, chain), verdict)
    return verdict


@torch.no_grad()
def verify_typical(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    *,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    correction: str = "argmax",
    entropy_epsilon: float = 0.0,
    keys: NoiseKeys | None = None,
    draft_lens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    backend: str = "auto",
) -> Verdict:
    """Keep drafted tokens while the target finds each typical: probability > min(threshold, alpha * exp(-entropy)).

    This does not keep the target's law.

    Args:
        target_logits: [B, K+1, V], float16, bfloat16, float32 or float64, any strides.
        draft_token_ids: [B, K] int32 or int64.
        posterior_threshold: in (0, 1), a probability.
        posterior_alpha: > 0.
        correction: "argmax" or "sample", how the token after the kept ones is chosen, the bonus token too.
        entropy_epsilon: >= 0, added inside the entropy's logarithm; 0 is the exact entropy in nats.
        keys: [B] int64 each, for correction="sample" (stream CORRECTION).
        draft_lens: [B] int32 or int64, how many drafted tokens count; None: all.
        temperature: divides the target's logits in float32; a float or [B], >= 0. 0 decides as `verify_greedy`.
        row_cutoffs: [B, K+1], after the temperature; the target's entries below are dropped.
        backend: "auto", "torch" or "triton".

    Returns:
        The verdict, [B, K+1] ids padded with -1.

    Raises:
        ConfigError: an unknown backend or correction, a number out of range, or correction="sample" without keys.
        KernelUnavailableError: backend="triton".
        ShapeError: a shape or dtype that does not fit.

    Source: Cai et al., arXiv:2401.10774, section 3.3.1.
    """
    check_backend(backend)
    check_round(target_logits, draft_token_ids, draft_lens)
    check_law(target_logits.shape[:2], "B, K+1", temperature, row_cutoffs)
    rule = TypicalRule(posterior_threshold, posterior_alpha, entropy_epsilon)
    if correction not in CORRECTIONS:
        raise ConfigError(f'correction must be one of "argmax", "sample", got {correction!r}; "argmax" needs no keys')
    if correction == "sample" and keys is None:
        raise ConfigError('keys must be given with correction="sample", got None; or pass correction="argmax"')
    if keys is not None:
        check_keys(keys, target_logits.shape[0])
    chain = make_chain(draft_token_ids, draft_lens, target_logits.shape[-1])
    if not isinstance(temperature, Tensor) and temperature == 0.0:
        return _greedy(target_logits, chain)
    law = to_law(target_logits, temperature, row_cutoffs)
    end = find_end(chain, accept_typical(law[:, :-1], chain.token_ids, rule))
    final_law = pick_rows(law, end.num_accepted)  # [B, V]
    best = first_max(final_law)
    final_ids = best.indices
    if correction == "sample" and keys is not None:
        final_ids = race(row_masses(final_law).masses, keys, Stream.CORRECTION, end.num_accepted)
    verdict = make_verdict(chain, end, final_ids, law_status(best.values))
    if isinstance(temperature, Tensor):
        return choose_rows(temperature == 0, _greedy(target_logits, chain), verdict)
    return verdict


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    keys: NoiseKeys,
    stream: Stream,
    temperature: float | Tensor = 1.0,
    row_cutoffs: Tensor | None = None,
    backend: str = "auto",
) -> Sampled:
    """Draw one token a row and keep the log-sum-exp that a verifier needs of its law.

    Args:
        logits: [B, V], float16, bfloat16, float32 or float64, any strides.
        keys: [B] int64 each; `positions` is that of the drawn token.
        stream: which noise; DRAFT for a drafter, RACE for coupled drafting and plain coupled decoding.
        temperature: divides the logits in float32; a float or [B], >= 0. 0 takes the argmax.
        row_cutoffs: [B], after the temperature; entries below are dropped.
        backend: "auto", "torch" or "triton".

    Returns:
        Ids in [0, V), and the log-sum-exp of the logits after temperature and cutoffs; at temperature 0 their
        maximum, so that the drawn token has probability 1. NaN, +inf or -inf: the row has no law.

    Raises:
        ConfigError: an unknown backend or a bad temperature.
        KernelUnavailableError: backend="triton".
        ShapeError: a shape or dtype that does not fit.
    """
    check_backend(backend)
    check_logits("logits", logits, "B, V")
    check_law(logits.shape[:1], "B", temperature, row_cutoffs)
    check_keys(keys, logits.shape[0])
    if not isinstance(temperature, Tensor) and temperature == 0.0:
        best = first_max(logits)
        return Sampled(best.indices, best.values)
    law = to_law(logits, temperature, row_cutoffs)
    masses, _, logsumexp = row_masses(law)
    here = torch.zeros(1, dtype=torch.int64, device=logits.device)
    token_ids = race(masses, keys, stream, here)
    if not isinstance(temperature, Tensor):
        return Sampled(token_ids, logsumexp)
    best = first_max(logits)
    argmax_rows = temperature == 0
    return Sampled(torch.where(argmax_rows, best.indices, token_ids), torch.where(argmax_rows, best.values, logsumexp))
