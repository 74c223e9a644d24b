"""Extra inputs: forward arguments other than tokens, for example encoder outputs or images."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_speculate.rows.per_row import PerRow, RowIndices

# Names of image and audio inputs.
MEDIA = {
    "audio_input_features",
    "image_patches",
    "image_pixel_values",
    "input_features",
    "input_values",
}
MEDIA |= {"mm_encoder_outputs", "pixel_values", "pixel_values_videos"}


class ExtraInputs(PerRow):
    """Forward arguments other than tokens, mask and positions.

    A text-only model has none. Each token after the prompt takes the next position on every axis,
    as in plain `generate`.
    """

    TENSORS = ("_every", "_types", "_columns")

    def __init__(
        self,
        # inputs for all forwards by name; tensors are [B, ...]
        every: Mapping[str, Any] | None = None,
        # inputs for the first forward only, which reads the whole prompt
        prompt: Mapping[str, Any] | None = None,
        # inputs for later forwards, [B, 1], equal for all tokens of a row
        types: Mapping[str, Tensor] | None = None,
        prefix: str = "",  # prefix of the text input names; "decoder_" for encoder-decoders
        # Inputs for later forwards with entries [B, 1, ...], which are repeated for every cached
        # column and every query column.
        columns: Mapping[str, Tensor] | None = None,
        description: str = "",  # description of the non-text inputs for `stats.plan`
    ):
        self.prefix, self.description = prefix, description
        self._every = dict(every or {})
        self._prompt = dict(prompt or {})
        self._types = dict(types or {})
        self._columns = dict(columns or {})
        # [..., B or 1, 1] int64, the model's positions minus the counted positions
        self._offsets: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the model reads only text; the prompt may consist of embeddings."""
        return not self._every and not self._prompt.keys() - {"inputs_embeds"} and not self.prefix

    @property
    def awaits_prompt(self) -> bool:
        """Whether the next forward takes the prompt's arguments."""
        return bool(self._prompt)

    @property
    def crosses(self) -> bool:
        return "encoder_outputs" in self._every

    @property
    def prompt_names(self) -> list[str]:
        return sorted(self._prompt)

    @property
    def prompt_axes(self) -> Tensor | None:
        """Prompt positions [1 or 3, B, Q] int64 in time, height and width; None without axes."""
        positions = self._prompt.get("position_ids")
        return positions[-3:] if positions is not None and positions.ndim == 3 else None

    @property
    def has_media(self) -> bool:
        """Whether the prompt contains images or audio."""
        return any(len(self._prompt[name]) for name in MEDIA & self._prompt.keys())

    def arguments(self, text: Mapping[str, Tensor], num_cached: int = 0) -> dict[str, Any]:
        """Return the arguments of the next forward.

        Args:
            text: `input_ids` [B, Q], mask and positions under names without the prefix.
            num_cached: T, number of cached columns.
        """
        arguments = {f"{self.prefix}{name}": value for name, value in text.items()}
        arguments |= self._every
        if self._prompt:
            prompt, self._prompt = self._prompt, {}
            if "inputs_embeds" in prompt:
                del arguments[f"{self.prefix}input_ids"]
            positions = prompt.get(f"{self.prefix}position_ids")
            if positions is not None and "position_ids" in text:
                self._offsets = positions[..., -1:] - text["position_ids"][:, -1:]
            return arguments | prompt
        num_query = text["input_ids"].shape[1]
        arguments |= {name: types.expand(-1, num_query) for name, types in self._types.items()}
        for name, entry in self._columns.items():
            # [B, T + Q, ...]
            arguments[name] = entry.expand(-1, num_cached + num_query, *entry.shape[2:])
        if self._offsets is not None:
            # [..., B, Q]
            arguments[f"{self.prefix}position_ids"] = text["position_ids"] + self._offsets
        return arguments

    def rows(self, indices: Sequence[int]) -> None:
        row_indices = RowIndices.of(indices)
        super().rows(row_indices)
        if self._offsets is not None and self._offsets.shape[-2] > 1:
            self._offsets = row_indices.select(self._offsets, dim=-2)
