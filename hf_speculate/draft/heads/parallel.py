"""Drafts all tokens of a round in one forward, over slots that hold a mask token: P-EAGLE and PARD.

The slots follow each row's newest tokens; the last of these gives the first draft, slot k gives draft k + 1. A draft
depends on none of the others, so sampling them one by one is sampling from the product of their distributions.

Source:
    PARD: An et al. (arXiv:2504.18583).
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate.draft.heads.folder import unserved
from hf_speculate.draft.heads.head import HeadSpec
from hf_speculate.draft.heads.load_network import ConfigSource, LoadRequest
from hf_speculate.draft.heads.network import HeadNetwork, TargetParts
from hf_speculate.draft.heads.round import HeadDrafter, NewTokens, last_of
from hf_speculate.draft.heads.row_cache import Placed, PlacedCache
from hf_speculate.draft.token_choice import RoundDraft
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.models.language_model import vocab_size_of


class SlotInputs(NamedTuple):
    """Tokens of each row, then slots."""

    token_ids: Tensor  # [B, N] int64; in slots anything
    states: Tensor | None  # [B, N, H], the target's after `project`; in slots anything
    is_slot: Tensor  # [B, N] bool, true in slots and after them
    placed: Placed  # columns are positions


class SlotNetwork(HeadNetwork):
    """A network that fills slots."""

    @abstractmethod
    def fill(self, inputs: SlotInputs, parts: TargetParts) -> Tensor:
        """[B, N, H], what the network makes of tokens and slots, after its final norm."""


class ParallelDrafter(HeadDrafter[SlotNetwork]):
    """Drafts with one forward of a `SlotNetwork` a round; prompts take one for each chunk."""

    def propose(self, new: NewTokens, num_draft_tokens: int, draft: RoundDraft) -> None:
        *before, last = new.chunks()
        for chunk in before:
            self.newest_outputs[0] = last_of(self._fill(chunk, 0), chunk, self.newest_outputs.get(0))
        outputs = self._fill(last, num_draft_tokens - 1)
        first = self.newest_outputs.get(0, torch.zeros_like(outputs[:, 0]))
        joined = torch.cat([first[:, None], outputs], dim=1)  # [B, 1 + N, H]
        index = last.lens[:, None] + torch.arange(num_draft_tokens, device=self.device)  # [B, K]
        chosen = joined.gather(1, index[:, :, None].expand(-1, -1, joined.shape[2]))  # [B, K, H]
        self.newest_outputs[0] = chosen[:, 0]
        draft.choose_all(self.network.logits(chosen, self.parts))

    def _fill(self, new: NewTokens, num_slots: int) -> Tensor:
        """[B, N, H] of new tokens with slots behind each row's own; the tokens stay in the cache."""
        width = new.width + num_slots
        is_slot = torch.arange(width, device=self.device) >= new.lens[:, None]  # [B, N]
        token_ids = torch.nn.functional.pad(new.token_ids, (0, num_slots))
        states = None if new.states is None else torch.nn.functional.pad(new.states, (0, 0, 0, num_slots))
        placed = self.cache.place(width)
        outputs = self.network.fill(SlotInputs(token_ids, states, is_slot, placed), self.parts)
        self.cache.advance(new.counts, new.lens)
        return outputs


_SERVED = ("llama", "qwen2", "qwen3")


class PardNetwork(SlotNetwork):
    """A transformers model, whose layers share one attention mask."""

    def __init__(self, model: PreTrainedModel, pard_token: int, vocab_size: int):
        super().__init__(DraftVocabulary(vocab_size), [None] * model.config.num_hidden_layers)
        self.model, self.pard_token = model, pard_token
        self._last_id = int(model.config.vocab_size) - 1

    def fill(self, inputs: SlotInputs, parts: TargetParts) -> Tensor:
        token_ids = inputs.token_ids.clamp_max(self._last_id).masked_fill(inputs.is_slot, self.pard_token)
        # given in any case, or the model would make one from the cache's length
        mask = replace(inputs.placed, is_bare=False).mask(0)  # [B, 1, N, T]
        decoder: Any = self.model.get_decoder()
        output = decoder(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=inputs.placed.columns,
            past_key_values=PlacedCache(inputs.placed),
            use_cache=True,
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, normed: Tensor, parts: TargetParts) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        return head(normed)  # type: ignore[no-any-return]


def read_pard(source: ConfigSource) -> tuple[HeadSpec, None]:
    """A PARD draft, which needs the target's vocabulary and none of its states."""
    source.check_no_layers("a PARD draft, which reads no hidden states")
    config = source.config
    model_type = config.get("model_type")
    if model_type not in _SERVED or "sliding_attention" in (config.get("layer_types") or ()):
        raise unserved(f"a PARD draft of model_type {model_type!r}", f"full attention and one of {', '.join(_SERVED)}")
    spec = source.spec(
        config,
        (),
        draft_vocab_size=min(int(config["vocab_size"]), source.shape.vocab_size),
        max_position_embeddings=config.get("max_position_embeddings"),
        is_vocab_padded=True,
    )
    return spec, None


def load_pard(request: LoadRequest) -> PardNetwork:
    """A PARD draft, read by transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        request.folder.source, dtype=request.dtype, trust_remote_code=False, attn_implementation="sdpa"
    )
    model.to(request.device)  # type: ignore[arg-type]  # transformers wraps torch's own method
    return PardNetwork(model, int(request.folder.config["pard_token"]), vocab_size_of(request.target))
