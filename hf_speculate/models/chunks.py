"""How much of its prompt a draft model is fed at once, so that it takes no more memory than the target did."""

from transformers import PreTrainedModel

# Shorter forwards save little memory, and read the weights more often.
MIN_CHUNK_TOKENS = 256


def draft_chunk_size(target: PreTrainedModel, draft: PreTrainedModel, num_query: int) -> int:
    """Tokens of each row per forward of the draft, for activations that are no larger than the target's.

    The draft's prompt is fed while the target's states are held, so activations larger than those of the target's
    own prompt of `num_query` tokens would raise the peak of the call. The widest layer stands for all of them.
    """
    draft_bytes = widest_bytes(draft)
    if not draft_bytes:
        return max(num_query, MIN_CHUNK_TOKENS)
    return max(num_query * widest_bytes(target) // draft_bytes, MIN_CHUNK_TOKENS)


def widest_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's activations behind the widest layer; 0 where layers do not tell. The head is left out."""
    head = model.get_output_embeddings()
    widths = [_width(module) for module in model.modules() if module is not head]
    return max(widths, default=0) * model.dtype.itemsize


def _width(module: object) -> int:
    """Features that a layer gives out, under torch's name for a linear layer or transformers' for GPT-2's."""
    width = getattr(module, "out_features", None) or getattr(module, "nf", None) or 0
    return width if isinstance(width, int) else 0
