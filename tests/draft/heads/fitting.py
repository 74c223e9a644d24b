"""A head that is right often enough for rounds of all lengths: it knows some texts by heart."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.draft.heads.designs import Design, make_weights, write_speculators
from tests.draft.heads.reference import Reference
from tests.draft.heads.rounds import states_of

RIDGE = 1e-4


@torch.no_grad()
def write_fitted(
    folder: Path, design: Design, target: PreTrainedModel, inputs: dict[str, Tensor], num_new: int, num_steps: int = 3
) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a head that knows the target's greedy texts by heart, but for some tokens; and these texts.

    Its `lm_head` is the ridge regression of the target's logits along the texts.
    """
    texts = target.generate(**inputs, max_new_tokens=num_new)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, num_new), value=1)
    weights, features, wanted = make_weights(design), [], []
    reference = Reference(design, weights, target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    reference.weights["lm_head.weight"] = torch.eye(design.hidden_size, dtype=torch.float64)
    for text in (ids[own.argmax() :].tolist() for ids, own in zip(texts, mask, strict=True)):
        logits = target(torch.tensor([text])).logits[0].double()
        states = states_of(target, text, design.aux_layers)
        for num in range(2, len(text) - num_steps):
            features.append(reference.logits(text[:num], states[: num - 1], text[num:], num_steps))
            wanted.append(logits[num - 1 : num - 1 + num_steps])
    x, y = torch.cat(features), torch.cat(wanted)[:, list(design.draft_ids or range(design.vocab_size))]
    penalty = RIDGE * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    weights["lm_head.weight"] = torch.linalg.solve(x.T @ x + penalty, x.T @ y).T.float()
    return write_speculators(folder, design, weights), {"input_ids": texts, "attention_mask": mask}
