"""Schedules: choose the number of tokens to draft in the next round."""

from hf_speculate.schedule.adaptive import AdaptiveSchedule
from hf_speculate.schedule.base import (
    PLAIN_STEP,
    Choice,
    DraftPrior,
    RoundOutcome,
    RowAhead,
    RowOutcome,
    Schedule,
)
from hf_speculate.schedule.constant import ConstantSchedule, HeuristicSchedule
from hf_speculate.schedule.memory import MemoryStore, ScheduleMemory

__all__ = [
    "PLAIN_STEP",
    "AdaptiveSchedule",
    "Choice",
    "ConstantSchedule",
    "DraftPrior",
    "HeuristicSchedule",
    "MemoryStore",
    "RoundOutcome",
    "RowAhead",
    "RowOutcome",
    "Schedule",
    "ScheduleMemory",
]
