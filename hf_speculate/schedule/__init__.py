"""Schedules: how many tokens to draft in the next round."""

from hf_speculate.schedule.adaptive import AdaptiveSchedule
from hf_speculate.schedule.base import RoundOutcome, Schedule
from hf_speculate.schedule.constant import ConstantSchedule
from hf_speculate.schedule.heuristic import HeuristicSchedule
from hf_speculate.schedule.history import HistoryStore, ScheduleHistory

__all__ = [
    "AdaptiveSchedule",
    "ConstantSchedule",
    "HeuristicSchedule",
    "HistoryStore",
    "RoundOutcome",
    "Schedule",
    "ScheduleHistory",
]
