"""Prepared calls, whose rows join those of other calls."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hf_speculate.config import SpeculationConfig
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.call import Call
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.stats import SpeculationStats


class Prepared(NamedTuple):
    """A call up to its decoder, which has not read the prompts."""

    decoder: SpeculativeDecoder
    batch: Batch
    call: Call
    config: SpeculationConfig
    stats: SpeculationStats


@dataclass
class Preparation:
    """A request to prepare a call instead of decoding it."""

    first_row: int  # number of the first output row
    prepared: list[Prepared] = field(default_factory=list)  # the result, once there is one
