"""What one `generate()` call prepared for decoding."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.draft.vocab_mapping import Vocabulary
from hf_speculate.engine.compile_plan import Static
from hf_speculate.engine.distributed import Peers, Shards
from hf_speculate.engine.outputs import Recorded
from hf_speculate.models.extra_inputs import Context


@dataclass(frozen=True)
class Call:
    """What one `generate()` call prepared for decoding.

    Args:
        input_ids: [B, T] int64, the prompts, left-padded.
        query_ids: [B, Q] int64, those of their tokens that the cache does not hold.
        attention_mask: [B, P] int64 over the cache's states and the query; None where nothing is padded.
        cache: the target's, empty or prefilled.
        is_cache_passed: whether the user passed the cache.
        is_cache_kept: whether the cache outlives the call.
        keeps_rows: whether code outside knows the batch, so that ended rows must stay in it.
        processors: the target's logits processors.
        criteria: the stopping criteria.
        do_sample: whether the call samples.
        max_length: columns of the output at most.
        pad_token_id: what fills ended rows.
        prefill_chunk_size: prompt tokens per forward.
        recorded: which outputs the call asked for.
        on_tokens: a streamer's callback.
        target_attention, draft_attention: names of the models' attention implementations.
        static: how buffers that never grow were asked for; None: they were not.
        vocabulary: how the draft's ids stand to the target's; None: they are the same.
        generator: what drafts in place of a model; None: a model does, or nothing.
        target_context, draft_context: what the models read besides the text.
        peers: the ranks that must run as many forwards; None: there are none.
        shards: the processes that compute a model together; None: each is computed by this one alone.
    """

    input_ids: Tensor
    query_ids: Tensor
    attention_mask: Tensor | None
    cache: Cache
    is_cache_passed: bool
    is_cache_kept: bool
    keeps_rows: bool
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    max_length: int
    pad_token_id: int | None
    prefill_chunk_size: int | None
    recorded: Recorded
    on_tokens: Callable[[list[int]], None] | None
    target_attention: str
    draft_attention: str
    static: Static | None = None
    vocabulary: Vocabulary | None = None
    generator: CandidateGenerator | None = None
    target_context: Context = field(default_factory=Context)
    draft_context: Context = field(default_factory=Context)
    peers: Peers | None = None
    shards: Shards | None = None

    @property
    def text_mask(self) -> Tensor | None:
        """[B, T] int64, which of the prompt's ids are real; None: all, as far as a mask over embeddings can tell."""
        num_ids = self.input_ids.shape[1]
        if self.attention_mask is None or not 0 < num_ids <= self.attention_mask.shape[1]:
            return None
        return self.attention_mask[:, -num_ids:]

    @property
    def num_pads(self) -> list[int] | None:
        """[B] tokens of padding before each prompt; None: none."""
        mask = self.text_mask
        if mask is None:
            return None
        pads: list[int] = mask.argmax(dim=1).tolist()
        return pads
