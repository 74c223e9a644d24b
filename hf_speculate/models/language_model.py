"""A causal language model as a function from tokens to logits, with the cache as its memory."""

import inspect
import threading
from collections.abc import Iterator
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
from hf_speculate.types import Scored

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of states and of weights that are not quantised."""


class StateCapture(AbstractContextManager["StateCapture", None], Protocol):
    """A context in which the hidden states of chosen layers are kept, forward by forward."""

    layers: tuple[int, ...]  # i is the input of decoder layer i, -1 the state after the final norm
    needs_all_tokens: bool  # whether states of all tokens are read, or those of the last one alone

    def concatenated(self) -> Tensor:
        """[B, Q, A * D], the states of all layers in the last forward, in the order of the ids."""


_LOCK = threading.Lock()
_eager_forwards: list[Any] = []  # the stance that torch had before them, once for each forward that is running


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Run what the caller compiled eagerly.

    A compiled forward would be traced anew for most forms of the cache's buffers, and breaks in them.
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
    """Calls a transformers model with the mask and position ids that its cache's rows need."""

    PARTS = ("extra_inputs",)

    pads_queries: bool = False
    """Whether `run` may feed further tokens after the query, which nothing reads but which may be NaN."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_position: int | None = None,  # upper bound of position ids, for tokens drafted past the end of the text
        keeps_states: bool = True,  # whether states, hidden states or attentions outlive the call
        extra_inputs: ExtraInputs | None = None,
        capture: StateCapture | None = None,  # captures hidden states, which forwards return in `Scored.captured`
        is_watched: bool = False,  # whether hooks of others may shorten the cache
    ):
        self.model = model
        self._is_watched = is_watched
        self.capture = capture
        self.extra_inputs = extra_inputs or ExtraInputs()
        self.max_position = max_position
        self.device = device_of(model)  # where query tokens are expected
        # Inference mode takes 6-8 % off a forward of small layers (2-core CPU, 16 of width 192)
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
        # A count of logits makes a view of the hidden states, which CPUs take three times as long to multiply by the
        # head's weights in float32 with 8 rows, and 20 to 100 times in bfloat16. Places make a compact copy.
        self._makes_compact = takes_indices and self.device.type == "cpu" and not saves
        # Layers that share states would skip the tokens that a count leaves out, and their states.
        self._runs_all_tokens = shares_states and capture is not None and capture.needs_all_tokens
        self._can_index = takes_indices and not _is_split(model)

    @property
    def eos_token_id(self) -> int:
        """The model's (first) end-of-sequence id, or a `ValueError`."""
        eos = self.model.generation_config.eos_token_id
        if eos is None or eos == []:
            raise ValueError("eos_token_id must be set in the model's generation config, got None; set it there")
        return int(eos[0] if isinstance(eos, list) else eos)

    def forward(self, query_token_ids: Tensor, kv_cache: KVCache, *, logits_to_keep: int | None = None) -> Tensor:
        """The last `logits_to_keep` logits [B, Q', V] or all, of query tokens [B, Q] int64, which advance the cache."""
        return self.run(query_token_ids, kv_cache, logits_to_keep=logits_to_keep).logits

    def run(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache,
        *,
        logits_to_keep: int | None = None,
        **forward_options: Any,
    ) -> Scored:
        """As `forward`, but with the model's whole output, for callers that want hidden states or attentions."""
        num_query = query_token_ids.shape[1]
        if num_query < 1:
            raise ShapeError(f"query_token_ids must be [B, Q] with Q >= 1, got {list(query_token_ids.shape)}")
        text = {"input_ids": query_token_ids}
        mask = kv_cache.mask(num_query)
        if mask is not None:
            text["attention_mask"] = mask  # type: ignore[assignment]  # or one by type of layer, as the model takes them
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
        with self._mode(), folding(is_captured=False), self._context(), self.capture or nullcontext():
            options[self._cache_name] = kv_cache.cache
            output = self.model(use_cache=True, return_dict=True, **options)
            captured = None if self.capture is None else self.capture.concatenated()
        kv_cache.advance(num_query)
        if self._is_watched:
            self._check_lens(kv_cache, num_columns + num_query)
        logits = output.logits if logits_to_keep is None else output.logits[:, -logits_to_keep:]  # [B, Q', V]
        hidden_states = output.get(f"{text_prefix(self.model)}hidden_states")
        return Scored(logits, hidden_states, output.get("attentions"), captured)

    def _check_lens(self, kv_cache: KVCache, num_columns: int) -> None:
        """Raise an error if somebody else has shortened a layer of the cache, which then has no rollback."""
        short = kv_cache.short_layer(num_columns)
        if short is not None:
            raise UnsupportedModelError(
                f"layers of the cache must keep all columns of a forward, got {short.num_columns} of {num_columns} in "
                f"layer {short.layer} of {type(self.model).__name__}, which has {described(foreign_code(self.model))}; "
                "remove what shortens the cache, or set speculation_hooks='plain'"
            )

    def run_unpadded(self, query_token_ids: Tensor, kv_cache: KVCache, **options: Any) -> Scored:
        """As `run`, eagerly, in a forward that holds the query's tokens and no others."""
        return LanguageModel.run(self, query_token_ids, kv_cache, **options)

    def join(self, other: "LanguageModel") -> None:
        """Serve the rows of `other` too; neither reads anything besides its tokens."""
        super().join(other)
        if self.max_position is not None and other.max_position is not None:
            self.max_position = max(self.max_position, other.max_position)


def _is_split(model: PreTrainedModel) -> bool:
    """Return whether the model lies on several devices, of which an index must name the right one."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def cache_name(module: nn.Module) -> str:
    """Return the name under which a module's forward takes its cache; empty if it takes none."""
    parameters = inspect.signature(type(module).forward).parameters
    name = next((name for name in CACHE_NAMES if name in parameters), "")
    if name in OLD_CACHE_NAMES and CACHE_NAME not in OLD_CACHE_NAMES and isinstance(module, PreTrainedModel):
        hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        return CACHE_NAME if hands_on else ""  # `generate` passes it under the new name in any case
    return name


def has_attention(model: PreTrainedModel) -> bool:
    """Return whether a model has attention layers, with or without recurrent ones."""
    name = cache_name(model)
    if name in OLD_CACHE_NAMES:  # one of the names was for models without attention layers
        return name != "cache_params"
    config = model.config.get_text_config(decoder=True)
    return only_attends(config) or not all(DynamicCache(config=config).is_linear)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: not "meta", where weights are that are loaded anew for every forward."""
    device = model.device
    return device if device.type != "meta" else module_device(model, torch.device("cpu"))


def module_device(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module computes: where its weights are, or where hooks (`_hf_hook`) load them for every forward."""
    weights = (weight for weights in (module.parameters(), module.buffers()) for weight in weights)
    device = next((weight.device for weight in weights if weight.device.type != "meta"), None)
    if device is not None:
        return device
    hooks = (hook for part in module.modules() for hook in _loading_hooks(part))
    named = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(name) for name in named if name is not None), default)


def _loading_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of accelerate on a module, which loads what is offloaded."""
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", (hook,)))


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of a model's states: that of its first weight that is not quantised."""
    dtypes = (weight.dtype for weight in model.parameters() if weight.dtype in COMPUTE_DTYPES)
    return next(dtypes, None) or getattr(model.config, "dtype", None) or torch.get_default_dtype()


def input_table(model: PreTrainedModel) -> Any:
    """Return the embeddings of a model's tokens; None if it has no table that can be named."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # as transformers does where a class names none
        return None


def plain_weight(module: nn.Module | None) -> Tensor | None:
    """The weight of a module; None if it has none, or a quantised one, whose dtype says nothing of the states."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dtype in COMPUTE_DTYPES else None


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model's forward is told the positions of its tokens, perhaps through its text decoder alone."""
    parameters = inspect.signature(type(model).forward).parameters
    if f"{text_prefix(model)}position_ids" in parameters:
        return True
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    decoder = text_decoder(model)
    is_inner = decoder is not model and not model.config.is_encoder_decoder
    return hands_on and is_inner and "position_ids" in inspect.signature(type(decoder).forward).parameters


def counts_columns(model: PreTrainedModel) -> bool:
    """Return whether a model places tokens by their column in the cache, so that no row may be moved."""
    config = model.config.get_text_config(decoder=True)
    if not has_attention(model):  # nor positions
        return False
    if config.model_type == "inkling_text" and config.log_scaling_n_floor is not None:
        return True  # its temperature grows with the column, whatever the position
    has_biases = hasattr(config, "relative_attention_num_buckets") or limit_reason(model, Limit.DISTANCES_ONLY)
    return not takes_positions(model) and not has_biases


def vocab_size_of(model: PreTrainedModel) -> int:
    """V of a model's text."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def text_prefix(model: PreTrainedModel) -> str:
    """Prefix of the names of a model's text inputs."""
    return "decoder_" if model.config.is_encoder_decoder else ""
