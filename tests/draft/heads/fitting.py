"""A head that is right often enough for rounds of all lengths: it knows some texts by heart."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.draft.heads.designs import Design, make_weights, write_speculators
from tests.draft.heads.reference import Reference
from tests.draft.heads.rounds import states_of

RIDGE = 1e-4


@torch.no_grad()
def fitted_weights(
    design: Design, target: PreTrainedModel, texts: Sequence[list[int]], num_steps: int = 3
) -> dict[str, Tensor]:
    """Weights of a design whose `lm_head` is the ridge regression of the target's logits along the texts."""
    weights = make_weights(design)
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    reference = Reference(design, weights, *tables)
    reference.weights["lm_head.weight"] = torch.eye(design.hidden_size, dtype=torch.float64)
    features, wanted = [], []
    for text in texts:
        logits = target(torch.tensor([text])).logits[0].double()
        states = states_of(target, text, design.aux_layers)
        for num in range(2, len(text) - num_steps):
            features.append(reference.logits(text[:num], states[: num - 1], text[num:], num_steps))
            wanted.append(logits[num - 1 : num - 1 + num_steps])
    x, y = torch.cat(features), torch.cat(wanted)[:, list(design.draft_ids or range(design.vocab_size))]
    penalty = RIDGE * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    weights["lm_head.weight"] = torch.linalg.solve(x.T @ x + penalty, x.T @ y).T.float()
    return weights


def write_fitted(
    folder: Path, design: Design, target: PreTrainedModel, inputs: dict[str, Tensor], num_new: int
) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a head that knows the target's greedy texts by heart, but for some tokens; and these texts."""
    texts = target.generate(**inputs, max_new_tokens=num_new)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, num_new), value=1)
    rows = [text[own.argmax() :].tolist() for text, own in zip(texts, mask, strict=True)]
    weights = fitted_weights(design, target, rows)
    return write_speculators(folder, design, weights), {"input_ids": texts, "attention_mask": mask}
