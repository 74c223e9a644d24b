"""The draft source for transformers' candidate generators."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.source import FactorySource, HistoryKey, hint_of, qualified_name
from hf_speculate.options.candidates.from_candidate_generator import (
    CandidateGeneratorDrafter,
    make_generator,
    samples_its_logits,
)


class CandidateSource(FactorySource):
    """The draft source for a candidate generator.

    A factory function makes a new generator for each run.
    """

    argument = "candidate_generator"
    hint = hint_of(argument)
    is_single_row = True
    reads_embeds = False
    reads_prepared = True
    unsynced = argument
    takes_turns = False  # a generator mistakes emitted tokens for its own candidates
    reads_outputs = "whose hidden states a candidate generator reads"
    drafter: CandidateGeneratorDrafter

    def __init__(self, generator: CandidateGenerator | Callable[..., CandidateGenerator]):
        self.generator = generator

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"candidate generator {type(self.drafter.generator).__name__}"

    def start(self, setup: DrafterSetup) -> CandidateGeneratorDrafter:
        return CandidateGeneratorDrafter(make_generator(self.generator, **setup.for_generators))

    def samples(self, config: SpeculationConfig, do_sample: bool) -> bool:
        return do_sample and samples_its_logits(self.drafter.generator)

    def history_key(self) -> HistoryKey:
        return HistoryKey(
            None, (f"candidate generator {qualified_name(self.drafter.generator)}", False)
        )


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> CandidateSource:
    """Make the draft source for `candidate_generator`."""
    return CandidateSource(values["candidate_generator"])
