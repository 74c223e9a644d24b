"""Search with faulty drafts: `python -m tests.reliability.bad_drafts --seed 1 --num 2000`.

Calls are drawn, compared with plain decoding and printed as in `tests.random_search`. No fault in a
draft may change a text or end a call.
"""

import copy
import random
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_speculate.options.heads.head import DraftHead
from tests.reliability.faults import Fault, Mistake
from tests.support.tiny import with_context

CONTEXT = 14  # tokens; reached by the texts of the search
FAULTS = (
    "context",
    "NaN",
    "infinity",
    "NaN of a token",
    "infinity of a token",
    "raises",
    "raises inside",
    "tables",
)


def with_fault(draft: Any, fault: str, at: int, seed: int) -> Any:
    """Return a copy of a draft model or head with one of `FAULTS`, which may raise at call `at`."""
    draw, is_head = random.Random(seed), isinstance(draft, DraftHead)
    if fault == "context" and not is_head:
        return with_context(draft, CONTEXT)
    draft = _copy_of_head(draft) if is_head else copy.deepcopy(draft)
    if fault == "context":
        draft.spec = replace(draft.spec, max_position_embeddings=CONTEXT)
        return draft
    network: nn.Module = draft.network if is_head else draft
    value = torch.nan if fault.startswith("NaN") else torch.inf
    weights = [weight for weight in network.parameters() if weight.ndim > 1]
    match fault:
        case "NaN" | "infinity":
            draw.choice(weights)[0, -1] = value
        case "NaN of a token" | "infinity of a token":  # not every text contains such a token
            weight = weights[0] if is_head else draft.get_input_embeddings().weight
            weight[draw.randrange(len(weight)) :: 7] = value
        case "raises" if not is_head:
            network.register_forward_hook(Fault(at, Mistake("on purpose")).tick)
        case "raises" | "raises inside":
            layers = [module for module in network.modules() if isinstance(module, nn.Linear)] or [
                network
            ]
            draw.choice(layers).register_forward_hook(Fault(at, Mistake("on purpose")).tick)
        case "tables" if not is_head:
            _change_tables(draft, at % 2 == 0)
    return draft


def _copy_of_head(head: Any) -> DraftHead:
    network = copy.deepcopy(head.network)
    return DraftHead(head.spec, network, head.config, partial(head._factory.func, network))


def _change_tables(draft: PreTrainedModel, is_narrow: bool) -> None:
    """Give the draft fewer embeddings than ids, or scores for ids outside every vocabulary."""
    embeddings, head = draft.get_input_embeddings(), draft.get_output_embeddings()
    if is_narrow and type(embeddings) is nn.Embedding:
        embeddings.weight = nn.Parameter(embeddings.weight[:-9].clone(), requires_grad=False)
        embeddings.num_embeddings = len(embeddings.weight)
    elif type(head) is nn.Linear and head.bias is None:
        wider = torch.cat([head.weight, 3 * head.weight[:9]])
        head.weight, head.out_features = nn.Parameter(wider, requires_grad=False), len(wider)


if __name__ == "__main__":
    from tests.random_search import main  # it draws calls with the faults above

    sys.exit(main(FAULTS))
