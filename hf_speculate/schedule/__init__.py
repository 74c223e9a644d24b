"""Schedules: how many tokens to draft in the next round."""

from hf_speculate.schedule.adaptive import AdaptiveSchedule
from hf_speculate.schedule.base import RoundOutcome, RowGain, Schedule
from hf_speculate.schedule.constant import ConstantSchedule
from hf_speculate.schedule.heuristic import HeuristicSchedule
from hf_speculate.schedule.history import HistoryStore, ScheduleHistory
from hf_speculate.schedule.prior import DraftPrior

__all__ = [
    "AdaptiveSchedule",
    "ConstantSchedule",
    "DraftPrior",
    "HeuristicSchedule",
    "HistoryStore",
    "RoundOutcome",
    "RowGain",
    "Schedule",
    "ScheduleHistory",
]
