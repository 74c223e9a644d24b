"""Record the runs of the SmolLM2 head, which are the numbers of correct drafts by position.

    python -m tests.schedule.laboratory.record [--lookup FILE] [--out FILE]

Ten tokens are drafted at each position. The texts come from the lookup file; SmolLM2-135M-Instruct
generated them greedily in float32.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.schedule.laboratory.texts import FOLDER, num_equal

NUM_DRAFTED = 10
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import models  # noqa: E402
from smollm2_head.head import DraftHead  # noqa: E402


@torch.inference_mode()
def head_runs(head: DraftHead, hidden: Tensor, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the number of correct greedy drafts [N] at each position of a text.

    Args:
        head: a draft head.
        hidden: [T, D] states of the target after each token of the prompt and the text.
        prompt: ids of the prompt.
        tokens: [N] ids of the text.
    """
    ids, runs = [*prompt, *tokens], []
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    states = head.project(hidden[:-1][None])
    heads, residual = head.attend_from(
        torch.tensor([ids[1:]]), states, head.turns(torch.arange(len(ids) - 1)[None])
    )
    # [1, Hkv, T - 1, D] for the tokens that the target has read.
    keys, values = heads.key, heads.value
    query = heads.query
    mixed = _attend(query, keys, values, groups, is_causal=True)
    output = head.finish(residual, mixed)  # [1, T - 1, D]
    for position in range(len(tokens)):
        # The last emitted token comes right before the position.
        last = len(prompt) + position - 2
        state, drafted = output[:, last : last + 1], []
        known_keys, known_values = keys[:, :, : last + 1], values[:, :, : last + 1]
        for step in range(NUM_DRAFTED):
            token = int(head.target_ids[head.logits(state[:, 0]).argmax(-1)])
            drafted.append(token)
            if step + 1 == NUM_DRAFTED or drafted != tokens[position : position + step + 1]:
                break
            turns = head.turns(torch.tensor([[last + 1 + step]]))
            of_token, residual = head.attend_from(torch.tensor([[token]]), state, turns)
            known_keys = torch.cat([known_keys, of_token.key], 2)
            known_values = torch.cat([known_values, of_token.value], 2)
            state = head.finish(residual, _attend(of_token.query, known_keys, known_values, groups))
        runs.append(num_equal(drafted, tokens[position:]))
    return runs


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, groups: int, is_causal: bool = False
) -> Tensor:
    repeated = (states.repeat_interleave(groups, 1) for states in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=is_causal)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what the SmolLM2 head would get right.")
    parser.add_argument("--lookup", type=Path, default=FOLDER / "lookup.json")
    parser.add_argument("--out", type=Path, default=FOLDER / "head.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(models.model_folder(), dtype=torch.float32).eval()
    head = DraftHead.load(models.HEAD, target)
    data = json.loads(args.lookup.read_text())
    for text in data["texts"]:
        hidden = _hidden_states(target, head, text["prompt"] + text["text"])
        text["runs"] = head_runs(head, hidden, text["prompt"], text["text"])
        print(text["kind"], sum(text["runs"]) / max(len(text["runs"]), 1), flush=True)
    args.out.write_text(json.dumps(data, separators=(",", ":")))


@torch.inference_mode()
def _hidden_states(target: torch.nn.Module, head: DraftHead, token_ids: list[int]) -> Tensor:
    """Return the states [T, D] that the head reads, one after each token."""
    layers = target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([layers[number][0] for number in head.hidden_layers], -1)


if __name__ == "__main__":
    main()
