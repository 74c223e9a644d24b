"""Log the acceptance of an enabled model's rollouts in trainers."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_speculate.generation.defaults import Defaults
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.stats import SpeculationStats


class RolloutCallback(TrainerCallback):
    """Trainer callback for the acceptance of rollouts.

    It logs the acceptance and warns about an old draft model. Pass `record` to the model, as in
    `enable(model, draft, speculation_stats=callback.record)`, and the callback to the trainer. Logs
    then hold `draft/acceptance_rate` and `draft/acceptance_length` (tokens per row and target
    forward) of the rollouts since the previous log. With a draft model, `draft/age` is the number
    of optimiser steps since `enable` got it. Callbacks earlier in the trainer's list read a log
    without these values.

    Args:
        max_draft_age: maximum age of a draft model in optimiser steps; an older draft model
            triggers one warning. None for no warning.
    """

    def __init__(self, max_draft_age: int | None = None):
        self.max_draft_age = max_draft_age
        self._stats = SpeculationStats()  # statistics of the rollouts since the last log
        self._defaults = Defaults({})  # latest defaults of `enable`
        self._first_step = 0  # step at which `enable` was called

    def record(self, stats: SpeculationStats) -> None:
        """Add the statistics of a call."""
        self._stats += stats

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the model's defaults and warn about an old draft model."""
        defaults = Defaults.of(unwrapped(kwargs["model"]))
        if defaults is not self._defaults:
            self._defaults, self._first_step = defaults, state.global_step
        age = self._draft_age(state)
        if age is not None and self.max_draft_age is not None and age > self.max_draft_age:
            defaults.warn_once(
                f"the draft model must be at most {self.max_draft_age} steps old, got more; "
                "call enable(model, draft) with one that was trained on newer rollouts"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the acceptance of the rollouts since the last log."""
        if self._stats.num_rounds:
            values: dict[str, float] = {
                "draft/acceptance_rate": self._stats.acceptance_rate,
                "draft/acceptance_length": self._stats.mean_acceptance_length,
            }
            age = self._draft_age(state)
            if age is not None:
                values["draft/age"] = age
            for log in (logs, *state.log_history[-1:]):
                if log is not None:
                    log.update(values)
            self._stats = SpeculationStats()

    def _draft_age(self, state: TrainerState) -> int | None:
        """Return the number of steps since `enable` got its draft model, or None without one."""
        is_model = self._defaults.values.get("assistant_model") is not None
        return state.global_step - self._first_step if is_model else None
