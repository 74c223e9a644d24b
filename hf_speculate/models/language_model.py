"""Language model: a function from tokens to logits, with a KV cache as its state."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.cache.layers import only_attends
from hf_speculate.compat import CACHE_NAME, CACHE_NAMES, OLD_CACHE_NAMES
from hf_speculate.errors import ShapeError, UnsupportedModelError
from hf_speculate.models.extra_inputs import ExtraInputs
from hf_speculate.models.folded_attention import folding
from hf_speculate.models.foreign_code import described, foreign_code
from hf_speculate.models.module_walk import is_compiled
from hf_speculate.models.quirks import Limit, growing_rope, limit_reason
from hf_speculate.models.text_decoder import text_decoder
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import (
    DeviceRows,
    DeviceVerdict,
    DraftOut,
    NoiseKeys,
    RoundRows,
    Scored,
    Verified,
)

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of states and of unquantised weights."""


class StateCapture(AbstractContextManager["StateCapture", None], Protocol):
    """A context recording hidden states of chosen layers."""

    layers: tuple[int, ...]  # i is the input of decoder layer i, -1 the state after the final norm
    needs_all_tokens: bool  # whether states of all tokens are read, or those of the last one alone

    def concatenated(self) -> Tensor:
        """Return the states of the last forward [B, Q, A * D], in the order of `layers`."""


_LOCK = threading.Lock()
_eager_forwards: list[Any] = []  # torch's previous stance, one entry per running forward


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Run the caller's compiled forwards eagerly.

    A compiled forward would be traced again for most shapes of the cache's buffers, with graph
    breaks in them.
    """
    with _LOCK:  # torch has one stance for all threads: the last forward to end restores it
        stance = _eager_forwards[0] if _eager_forwards else torch.compiler.set_stance("force_eager")
        _eager_forwards.append(stance)
    try:
        yield
    finally:
        with _LOCK:
            _eager_forwards.pop()
            if not _eager_forwards:
                stance.__exit__(None, None, None)


class LanguageModel(PerRow):
    """A transformers model, called with a KV cache.

    Each call takes the mask and position ids from the cache's rows.
    """

    PARTS = ("extra_inputs",)

    pads_queries: bool = False
    """Whether `run` may append unused tokens to the query; their states may be NaN."""

    def __init__(
        self,
        model: PreTrainedModel,
        # maximum position id, for tokens drafted past the end of the sequence
        max_position: int | None = None,
        # whether KV states, hidden states or attentions outlive the call
        keeps_states: bool = True,
        extra_inputs: ExtraInputs | None = None,
        capture: StateCapture | None = None,  # records hidden states for `Scored.captured`
        is_watched: bool = False,  # whether user hooks may shorten the cache
    ):
        self.model = model
        self._is_watched = is_watched
        self.capture = capture
        self.extra_inputs = extra_inputs or ExtraInputs()
        self.max_position = max_position
        self.device = device_of(model)  # device of query tokens
        # Inference mode makes forwards of small layers 6 to 8 % faster (2-core CPU, 16 layers of
        # width 192).
        self._mode = torch.no_grad if keeps_states or growing_rope(model) else torch.inference_mode
        self._context = running_eagerly if is_compiled(model) else nullcontext
        self._takes_position_ids = takes_positions(model)
        self._cache_name = cache_name(model)
        parameter = inspect.signature(type(model).forward).parameters.get("logits_to_keep")
        self._takes_logits_to_keep = parameter is not None
        takes_indices = parameter is not None and "Tensor" in str(parameter.annotation)
        config = model.config.get_text_config(decoder=True)
        shares_states = getattr(config, "num_kv_shared_layers", 0) > 0
        saves = bool(limit_reason(model, Limit.LOGITS_BY_COUNT)) and shares_states
        # An int slices a view of the hidden states. On CPUs the head's matmul on a view is 3x
        # slower in float32 (8 rows), and 20x to 100x slower in bfloat16. Indices copy.
        self._makes_compact = takes_indices and self.device.type == "cpu" and not saves
        # With an int, layers with shared states skip the other tokens, and their states are
        # missing.
        self._runs_all_tokens = shares_states and capture is not None and capture.needs_all_tokens
        self._can_index = takes_indices and not _is_split(model)

    @property
    def eos_token_id(self) -> int:
        """First end-of-sequence id of the model.

        Raises:
            ValueError: The generation config sets none.
        """
        eos = self.model.generation_config.eos_token_id
        if eos is None or eos == []:
            raise ValueError(
                "eos_token_id must be set in the model's generation config, got None; set it there"
            )
        return int(eos[0] if isinstance(eos, list) else eos)

    def forward(
        self, query_token_ids: Tensor, kv_cache: KVCache, *, logits_to_keep: int | None = None
    ) -> Tensor:
        """Read query tokens [B, Q] int64, advance the cache, and return logits [B, Q', V].

        Q' is `logits_to_keep`, or Q if it is None.
        """
        return self.run(query_token_ids, kv_cache, logits_to_keep=logits_to_keep).logits

    def run(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        *,
        logits_to_keep: int | None = None,
        **forward_options: Any,
    ) -> Scored:
        """Run `forward` and return all outputs, with hidden states and attentions if requested.

        Raises:
            ShapeError: The query is empty.
            UnsupportedModelError: A hook has shortened the cache.
        """
        num_query = query_token_ids.shape[1]
        if num_query < 1:
            raise ShapeError(
                f"query_token_ids must be [B, Q] with Q >= 1, got {list(query_token_ids.shape)}"
            )
        text = {"input_ids": query_token_ids}
        mask = kv_cache.mask(num_query)
        if mask is not None:
            text["attention_mask"] = mask  # type: ignore[assignment]  # or a dict of masks
        num_columns = kv_cache.num_columns
        if self._takes_position_ids:
            positions = kv_cache.position_ids(num_query)
            if self.max_position is not None and num_columns + num_query > self.max_position + 1:
                positions = positions.clamp_max(self.max_position)
            text["position_ids"] = positions
        options = self.extra_inputs.arguments(text, num_columns) | forward_options
        if self._takes_logits_to_keep and logits_to_keep is not None:
            is_view = 0 < logits_to_keep < num_query
            if is_view and (self._makes_compact or (self._runs_all_tokens and self._can_index)):
                first = num_query - logits_to_keep
                options["logits_to_keep"] = torch.arange(first, num_query, device=self.device)
            elif not (is_view and self._runs_all_tokens):
                options["logits_to_keep"] = logits_to_keep
        with (
            self._mode(),
            folding(is_captured=False),
            self._context(),
            self.capture or nullcontext(),
        ):
            options[self._cache_name] = kv_cache.cache
            output = self.model(use_cache=True, return_dict=True, **options)
            captured = None if self.capture is None else self.capture.concatenated()
        kv_cache.advance(num_query)
        if self._is_watched:
            self._check_lens(kv_cache, num_columns + num_query)
        # [B, Q', V]
        logits = output.logits if logits_to_keep is None else output.logits[:, -logits_to_keep:]
        hidden_states = output.get(f"{text_prefix(self.model)}hidden_states")
        return Scored(logits, hidden_states, output.get("attentions"), captured)

    def _check_lens(self, kv_cache: KVCache, num_columns: int) -> None:
        """Raise an error if foreign code has shortened a layer of the cache: its rollback fails."""
        short = kv_cache.short_layer(num_columns)
        if short is not None:
            raise UnsupportedModelError(
                f"layers of the cache must keep all columns of a forward, got {short.num_columns} "
                f"of {num_columns} in "
                f"layer {short.layer} of {type(self.model).__name__}, which has "
                f"{described(foreign_code(self.model))}; "
                "remove what shortens the cache, or set speculation_hooks='plain'"
            )

    def run_round(
        self,
        rows: RoundRows,
        draft: DraftOut,
        kv_cache: KVCache,
        rule: Callable[[Tensor, DraftOut, NoiseKeys, Tensor], DeviceVerdict],
    ) -> Scored | None:
        """Score and verify a round by a single launch; None if that is not possible.

        Args:
            rows: The rows before the round.
            draft: The drafted tokens.
            kv_cache: The cache, which is advanced by K+1 tokens.
            rule: Function of logits [B, K+1, V], draft, noise keys and the newest tokens [B, 1].
                Equal functions launch the same operators.

        Returns:
            Logits [B, K+1, V], and the verdict as `judged`.
        """
        return None

    def end_round(
        self, verified: Verified, rows: RoundRows, kv_cache: KVCache
    ) -> DeviceRows | None:
        """End a round of `run_round`.

        Args:
            verified: The verdict of the round.
            rows: The rows before the next round.
            kv_cache: The cache, rolled back.

        Returns:
            The state before the next round, if it is on the device already.
        """
        return None

    def run_unpadded(self, query_token_ids: Tensor, kv_cache: KVCache, **options: Any) -> Scored:
        """Call `run` eagerly and without padding the query."""
        return LanguageModel.run(self, query_token_ids, kv_cache, **options)

    def join(self, other: "LanguageModel") -> None:
        """Add the rows of `other`; both must read tokens only."""
        super().join(other)
        if self.max_position is not None and other.max_position is not None:
            self.max_position = max(self.max_position, other.max_position)


def _is_split(model: PreTrainedModel) -> bool:
    """Return whether the model is split over several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def cache_name(module: nn.Module) -> str:
    """Return the name of the forward's cache argument; empty if it takes no cache."""
    parameters = inspect.signature(type(module).forward).parameters
    name = next((name for name in CACHE_NAMES if name in parameters), "")
    if (
        name in OLD_CACHE_NAMES
        and CACHE_NAME not in OLD_CACHE_NAMES
        and isinstance(module, PreTrainedModel)
    ):
        hands_on = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        return CACHE_NAME if hands_on else ""  # `generate` passes it under the new name in any case
    return name


def has_attention(model: PreTrainedModel) -> bool:
    """Return whether a model has attention layers, with or without recurrent ones."""
    name = cache_name(model)
    if name in OLD_CACHE_NAMES:  # cache_params belonged to models without attention layers
        return name != "cache_params"
    config = model.config.get_text_config(decoder=True)
    return only_attends(config) or not all(DynamicCache(config=config).is_linear)


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device for input ids.

    Offloaded models report "meta"; use the first real parameter's device.
    """
    device = model.device
    return device if device.type != "meta" else module_device(model, torch.device("cpu"))


def module_device(module: nn.Module, default: torch.device) -> torch.device:
    """Return the device of a module's weights, or the one used by accelerate's offloading hooks."""
    weights = (weight for weights in (module.parameters(), module.buffers()) for weight in weights)
    device = next((weight.device for weight in weights if weight.device.type != "meta"), None)
    if device is not None:
        return device
    hooks = (hook for part in module.modules() for hook in _loading_hooks(part))
    named = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(name) for name in named if name is not None), default)


def is_offloaded(model: PreTrainedModel) -> bool:
    """Return whether weights are loaded for every forward, from another device or from disk."""
    is_placed = getattr(model, "hf_device_map", None) is not None
    return is_placed and any(weight.is_meta for weight in model.parameters())


def _loading_hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks on a module; they load offloaded weights."""
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", (hook,)))


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of a model's states, from its first unquantised weight."""
    dtypes = (weight.dtype for weight in model.parameters() if weight.dtype in COMPUTE_DTYPES)
    return next(dtypes, None) or getattr(model.config, "dtype", None) or torch.get_default_dtype()


def input_table(model: PreTrainedModel) -> Any:
    """Return the token embeddings of a model; None if its class names none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # raised by transformers for a class without a named table
        return None


def plain_weight(module: nn.Module | None) -> Tensor | None:
    """Return the unquantised weight of a module; None if it has none."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dtype in COMPUTE_DTYPES else None


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model's forward takes position ids, by itself or for its text decoder."""
    parameters = inspect.signature(type(model).forward).parameters
    if f"{text_prefix(model)}position_ids" in parameters:
        return True
    hands_on = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    decoder = text_decoder(model)
    is_inner = decoder is not model and not model.config.is_encoder_decoder
    return (
        hands_on
        and is_inner
        and "position_ids" in inspect.signature(type(decoder).forward).parameters
    )


def counts_columns(model: PreTrainedModel) -> bool:
    """Return whether a model places tokens by cache column; its rows cannot be shifted."""
    config = model.config.get_text_config(decoder=True)
    if not has_attention(model):  # recurrent models have no positions
        return False
    if config.model_type == "inkling_text" and config.log_scaling_n_floor is not None:
        return True  # its temperature grows with the column, whatever the position
    has_biases = hasattr(config, "relative_attention_num_buckets") or limit_reason(
        model, Limit.DISTANCES_ONLY
    )
    return not takes_positions(model) and not has_biases


def vocab_size_of(model: PreTrainedModel) -> int:
    """Return V, the vocabulary size of a model's text decoder."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def text_prefix(model: PreTrainedModel) -> str:
    """Return the prefix of a model's text input names."""
    return "decoder_" if model.config.is_encoder_decoder else ""
