"""Decode a call speculatively after transformers has prepared its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.utils.generic import ModelOutput

from hf_speculate.cache.static import static_copies
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.call import ONE_CALL, RowLists
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.outputs import GenerateOutput
from hf_speculate.engine.plan import make_plan
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.generation.inputs import read_call
from hf_speculate.generation.plain_decoding import (
    decode_plainly,
    plain_reason,
    returned_cache,
    self_test,
)
from hf_speculate.generation.request import Request, refusals
from hf_speculate.models.attention_names import folded_attention_for


@dataclass(eq=False)
class SpeculativeDecoding:
    """A `custom_generate` function for one call to `generate()`.

    Whisper's own `generate` runs the function several times per call.
    """

    request: Request
    clock: StageClock  # started when the call began
    row_lists: RowLists = ONE_CALL
    # Receives the decoder instead of decoding, for rows that join a running batch; None to decode.
    on_prepared: Callable[[SpeculativeDecoder], object] | None = None
    num_runs: int = field(default=0, init=False)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        self.clock.enter(Stage.PREPARE, 0)
        self.num_runs += 1
        with refusals(self.request.is_default and self.num_runs == 1):
            call = read_call(
                self.request,
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                inputs_tensor,
                model_kwargs,
                row_lists=self.row_lists,
                num_run=self.num_runs - 1,
            )
        source, stats = call.source, self.request.stats
        comparison = self_test(call, source)
        reason = "" if self.on_prepared is not None else plain_reason(call, source, stats)
        if reason and call.config.verifier != "coupled":
            return self._timed(decode_plainly(call, logits_processor, stopping_criteria, stats))
        with refusals(self.request.is_default and self.num_runs == 1):
            plan = make_plan(call, stats, drafts=not reason, self_test=comparison)
        decoder = SpeculativeDecoder.of(plan, stats, self.clock)
        if self.on_prepared is not None:
            self.on_prepared(decoder)
            return call.prompts.input_ids
        return self._timed(self._decode(decoder))

    def _timed(self, output: GenerateOutput | Tensor) -> GenerateOutput | Tensor:
        """Add the time since the last round to the statistics and return the output."""
        self.clock.enter(Stage.INPUTS)  # a model's own generate() may start another run
        self.request.stats.add_seconds(self.clock.lap())
        return output

    def _decode(self, decoder: SpeculativeDecoder) -> GenerateOutput | Tensor:
        plan, call = decoder.plan, decoder.plan.call
        input_ids, pad_id = call.prompts.input_ids, call.pad_token_id or 0
        folded = folded_attention_for(plan.models)
        with folded, decoder.caches(call.is_cache_passed):
            decoder.decode(Batch.of(plan))
            self.clock.enter(Stage.RETURN)
            decoder.target.kv_cache.hand_back()
            cache = returned_cache(call)
            if call.streamer is not None:
                call.streamer.end()
            output: GenerateOutput | Tensor
            if call.generation_config.return_dict_in_generate:
                encoded = call.model_kwargs.get("encoder_outputs")
                encoder_states = (
                    encoded.get("hidden_states") if isinstance(encoded, ModelOutput) else None
                )
                output = decoder.output.output(input_ids, pad_id, cache, encoder_states)
            else:
                output = decoder.output.sequences(input_ids, pad_id)
            for row, ids in enumerate(decoder.output.new_ids.values()):
                plan.source.keep_row(ids, partial(call.prompts.real_ids, row))
            if call.static_cache is not None:
                # this comes last because it cannot be undone
                static_copies().write_back(call.cache, call.static_cache)
        return output
