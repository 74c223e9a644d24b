"""Decodes a batch by any of the methods, through public `generate()`."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.config import FIELD_NAMES
from hf_speculate.generation.mixin import generate
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.batches import Batch
from hf_speculate.tools.bench.methods import OURS, PLAIN, Method


class Decoded(NamedTuple):
    """What one method made of a batch.

    Args:
        new_ids: one [N] int64 per row, padding after its end included.
        stats: of the call; None where it was not ours.
    """

    new_ids: list[Tensor]
    stats: SpeculationStats | None


class Decoder:
    """Decodes batches with one pair of models.

    The models' own generation configs may hold fields that turn plain decoding into something else: the decoder works
    on views of the models, of the same weights, without them.

    Args:
        target: enabled or not; left as it is.
        draft_arguments: `assistant_model`, the draft's tokenizer where vocabularies differ, and the target's, which the
            stop strings of a generation config need too.
        max_new_tokens: N.
        sampling: arguments of transformers' own, for methods that draw.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft_arguments: Mapping[str, Any],
        *,
        max_new_tokens: int,
        sampling: Mapping[str, Any] | None = None,
    ):
        self.target = _view(target)
        self.max_new_tokens = max_new_tokens
        self._draft_arguments = {**draft_arguments, "assistant_model": _view(draft_arguments["assistant_model"])}
        self._assistants: dict[str, PreTrainedModel] = {}  # by the name of transformers' method
        self._sampling = sampling or {}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a row."""
        ids = getattr(self.target.generation_config, "eos_token_id", None)
        return frozenset() if ids is None else frozenset(ids if isinstance(ids, list | tuple) else [ids])

    def __call__(self, method: Method, batch: Batch, seed: int, max_new_tokens: int | None = None) -> Decoded:
        """Decode; the work is done when this returns, on a GPU too.

        Args:
            method: how.
            batch: what.
            seed: of what is drawn.
            max_new_tokens: in place of the decoder's own.
        """
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens or self.max_new_tokens,
            "do_sample": method.do_sample,
        }
        if method.do_sample:
            options |= self._sampling
            torch.manual_seed(seed)
        stats = None
        if method.engine == PLAIN:
            new_ids = self._plain(batch, options)
        elif method.engine == OURS:
            stats = SpeculationStats()
            seeded = {"seed": seed} if method.do_sample else {}
            options |= {**self._draft_arguments, **seeded, **method.fields, "speculation_stats": stats}
            output: Any = generate(self.target, **_inputs(batch), **options)
            new_ids = list(output[:, batch.input_ids.shape[1] :])
        else:
            new_ids = self._assisted(method, batch, options)
        if self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)
        return Decoded(new_ids, stats)

    def _plain(self, batch: Batch, options: dict[str, Any]) -> list[Tensor]:
        tokenizer = self._draft_arguments.get("tokenizer")
        output: Any = self.target.generate(**_inputs(batch), tokenizer=tokenizer, **options)  # type: ignore[operator]
        return list(output[:, batch.input_ids.shape[1] :])

    def _assisted(self, method: Method, batch: Batch, options: dict[str, Any]) -> list[Tensor]:
        """Assisted generation of transformers, which takes one row: the rows in turn, without padding."""
        if method.name not in self._assistants:
            draft = _view(self._draft_arguments["assistant_model"])  # it reads the number of tokens from the draft
            if method.fields:
                draft.generation_config.update(**method.fields, assistant_confidence_threshold=0.0)
            self._assistants[method.name] = draft
        arguments = {**self._draft_arguments, "assistant_model": self._assistants[method.name]}
        new_ids = []
        for ids in batch.rows:
            output: Any = self.target.generate(  # type: ignore[operator]
                input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **arguments, **options
            )
            new_ids.append(output[0, len(ids) :])
        return new_ids


def _inputs(batch: Batch) -> dict[str, Any]:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _view(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under a generation config of its own, without speculative fields; not enabled."""
    view = copy.copy(model)
    view.generation_config = copy.deepcopy(model.generation_config)
    for name in FIELD_NAMES:
        if getattr(view.generation_config, name, None) is not None:
            setattr(view.generation_config, name, None)
    return view
