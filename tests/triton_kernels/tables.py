"""Language models that are tables, decoded over several rounds.

Node 0 is the empty text and node n followed by token x is node n * V + x + 1, so a text is one integer and the nodes
of one length lie side by side.
"""

from typing import Any

import torch
from torch import Tensor

from hf_speculate.triton_kernels import NoiseKeys, Stream, sample
from tests.triton_kernels.distributions import chunks, p_value
from tests.triton_kernels.operations import Operation


def num_nodes(vocab_size: int, length: int) -> int:
    """How many texts are shorter than `length`; also the first node of that length."""
    return sum(vocab_size**shorter for shorter in range(length))


def make_tables(vocab_size: int, max_len: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Target and draft logits [N, V] after every text up to `max_len`; the draft ranks tokens the other way round."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(num_nodes(vocab_size, max_len + 1), vocab_size, generator=generator)
    ranks = target.argsort(-1)
    return target, torch.empty_like(target).scatter_(-1, ranks, target.gather(-1, ranks.flip(-1)))


def text_law(table: Tensor, length: int) -> Tensor:
    """Probability of every text of `length` tokens, [V**length] float64, in the order of their nodes."""
    probs, vocab_size = table.double().softmax(-1), table.shape[1]
    law = torch.ones(1, dtype=torch.float64)
    for shorter in range(length):
        start = num_nodes(vocab_size, shorter)
        law = (law.unsqueeze(-1) * probs[start : start + len(law)]).flatten()
    return law


def count_texts(nodes: Tensor, vocab_size: int, length: int) -> Tensor:
    """How often each text of `length` tokens occurred, cells as in `text_law`."""
    return torch.bincount(nodes - num_nodes(vocab_size, length), minlength=vocab_size**length)


def decode_plainly(table: Tensor, seeds: Tensor, length: int) -> Tensor:
    """Texts [B] of `length` tokens, drawn token by token with stream RACE."""
    nodes, zeros = torch.zeros_like(seeds), torch.zeros_like(seeds)
    for position in range(length):
        keys = NoiseKeys(seeds, zeros, zeros + position)
        nodes = nodes * table.shape[1] + sample(table[nodes], keys=keys, stream=Stream.RACE).token_ids + 1
    return nodes


def draft_chain(
    table: Tensor, nodes: Tensor, keys: NoiseKeys, num_tokens: int, stream: Stream
) -> tuple[Tensor, Tensor]:
    """Drafted ids [B, K], and the nodes [B, K+1] before each and after the last."""
    ids, path = [], [nodes]
    for offset in range(num_tokens):
        keys_there = keys._replace(positions=keys.positions + offset)
        ids.append(sample(table[path[-1]], keys=keys_there, stream=stream).token_ids)
        path.append(path[-1] * table.shape[1] + ids[-1] + 1)
    return torch.stack(ids, dim=-1), torch.stack(path, dim=-1)


def decode(
    target: Tensor,
    draft: Tensor,
    seeds: Tensor,
    verify: Operation,
    *,
    length: int,
    num_draft_tokens: int,
    stream: Stream = Stream.DRAFT,
    end_token_id: int | None = None,
    with_rounds: bool = True,
) -> Tensor:
    """Texts [B] of `length` tokens, drafted and verified round after round."""
    vocab_size = target.shape[1]
    nodes, lens = torch.zeros_like(seeds), torch.zeros_like(seeds)
    rounds = 0
    while (rows := (lens < length).nonzero().squeeze(-1)).numel():
        begun = torch.full_like(rows, rounds if with_rounds else 0)
        keys = NoiseKeys(seeds[rows], begun, lens[rows])
        ids, path = draft_chain(draft, nodes[rows], keys, num_draft_tokens, stream)
        draft_lens = torch.full_like(rows, num_draft_tokens)
        if end_token_id is not None:
            draft_lens = (ids != end_token_id).cumprod(-1).sum(-1).add_(1).clamp_(max=num_draft_tokens)
        verdict = verify(target[path], ids, draft[path[:, :-1]], keys, draft_lens)
        for token_ids in verdict.token_ids.unbind(-1):
            grows = (token_ids >= 0) & (lens[rows] < length)
            nodes[rows] = torch.where(grows, nodes[rows] * vocab_size + token_ids + 1, nodes[rows])
            lens[rows] += grows
        rounds += 1
    return nodes


def text_p_value(verify: Operation, num_texts: int, **options: Any) -> float:
    """The first four tokens of a model over three letters, three drafted a round, against their exact distribution."""
    target, draft = make_tables(3, 4 + 3)
    counts = torch.zeros(81, dtype=torch.int64)
    for keys in chunks(num_texts):
        texts = decode(target, draft, keys.seeds, verify, length=4, num_draft_tokens=3, **options)
        counts += count_texts(texts, 3, 4)
    return p_value(counts, text_law(target, 4))
