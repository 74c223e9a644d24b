"""What a speculative call did, counted and timed."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import rich.markup
import rich.table

from hf_speculate.optional_imports import import_extra
from hf_speculate.plotting import figure_of

STAGES = ("prefill", "draft", "score", "verify", "bookkeeping")
MAX_DRAFT_LENS = 16_384  # rounds whose draft lengths are kept in order: 128 KiB


@dataclass
class SpeculationStats:
    """Counts and seconds of one `generate()` call; each call starts it anew.

    Where a model's own `generate()` decodes in several calls, as Whisper's does, they are added up.

    Times are the host's. On an accelerator work runs on after it was launched, so its cost shows up in the stage
    that waits for it.

    Attributes:
        verifier: name of the verifier that ran.
        cache: where the target's states were kept, "dynamic" or "preallocated".
        compiled: which models' forwards ran compiled in all rounds, "target" and "draft".
        num_rounds: rounds summed over the rows that were live in them.
        num_batch_rounds: rounds of the batch.
        num_drafted: drafted tokens that counted, summed over rows.
        num_judged: drafted tokens up to and with the first refused one of a round.
        num_accepted: drafted tokens that stayed.
        num_emitted: tokens that rounds added to the output; the token that follows the prompt is not among them.
        num_host_syncs: times our own code waited for the device.
        num_user_host_syncs: calls of processors, criteria or streamers that may have waited for it.
        status: `Status` flags of all rounds, joined.
        lock_step: whether all rows moved by the same number of tokens.
        fallbacks: what ran otherwise than asked, with the reason.
        judged_by_position, accepted_by_position: one entry per position in the draft.
        rounds_by_draft_len: rounds of the batch by tokens drafted; 0 counts the plain steps.
        draft_lens: tokens drafted in each round of the batch, in order; the first 16,384 rounds.
        prefill_s, draft_s, score_s, verify_s, bookkeeping_s: seconds in each stage; prefill is the target's.
    """

    verifier: str = ""
    cache: str = ""
    compiled: list[str] = field(default_factory=list)
    num_rounds: int = 0
    num_batch_rounds: int = 0
    num_drafted: int = 0
    num_judged: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_host_syncs: int = 0
    num_user_host_syncs: int = 0
    status: int = 0
    lock_step: bool = False
    fallbacks: list[str] = field(default_factory=list)
    judged_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    rounds_by_draft_len: dict[int, int] = field(default_factory=dict)
    draft_lens: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    bookkeeping_s: float = 0.0

    def reset(self) -> None:
        """Set every field back, in place."""
        fresh = SpeculationStats()
        for entry in fields(self):
            setattr(self, entry.name, getattr(fresh, entry.name))

    def add_fallback(self, reason: str) -> None:
        """Note once what ran otherwise than asked."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)

    def add_row(self, num_drafted: int, num_accepted: int, num_emitted: int, num_judged: int | None = None) -> None:
        """Count one row's round.

        Args:
            num_drafted: tokens drafted for the row.
            num_accepted: those of them that stayed.
            num_emitted: tokens that went into the output, after stopping.
            num_judged: drafted tokens that the verifier looked at; None: those up to and with the first refused one.
        """
        if num_judged is None:
            num_judged = min(num_accepted + 1, num_drafted)
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_judged += num_judged
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        missing = num_judged - len(self.judged_by_position)
        if missing > 0:
            self.judged_by_position += [0] * missing
            self.accepted_by_position += [0] * missing
        for position in range(num_judged):
            self.judged_by_position[position] += 1
            self.accepted_by_position[position] += position < num_accepted

    def add_draft_len(self, num_drafted: int) -> None:
        """Count one round of the batch in which `num_drafted` tokens were drafted."""
        self.rounds_by_draft_len[num_drafted] = self.rounds_by_draft_len.get(num_drafted, 0) + 1
        if len(self.draft_lens) < MAX_DRAFT_LENS:
            self.draft_lens.append(num_drafted)

    @property
    def acceptance(self) -> float:
        """Accepted over judged tokens, in [0, 1]; 0 when nothing was judged."""
        return self.num_accepted / self.num_judged if self.num_judged else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Acceptance of the first, second, ... drafted token, given that it was judged."""
        pairs = zip(self.accepted_by_position, self.judged_by_position, strict=True)
        return [accepted / judged for accepted, judged in pairs]

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per row and round; 0 before the first round."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def seconds_by_stage(self) -> dict[str, float]:
        """Seconds of prefill, draft, score, verify and bookkeeping."""
        return {stage: getattr(self, f"{stage}_s") for stage in STAGES}

    @property
    def total_s(self) -> float:
        """Seconds of all stages; what `generate()` does before and after decoding is not among them."""
        return sum(self.seconds_by_stage.values())

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of all stages but the prefill, summed over rows; 0 before the first round."""
        decoding_s = self.total_s - self.prefill_s
        return self.num_emitted / decoding_s if self.num_emitted and decoding_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every count and every figure that follows from them, as plain values that JSON holds.

        The keys of `rounds_by_draft_len` are text, as JSON writes them.
        """
        return asdict(self) | {
            "rounds_by_draft_len": {str(num): count for num, count in sorted(self.rounds_by_draft_len.items())},
            "acceptance": self.acceptance,
            "acceptance_by_position": self.acceptance_by_position,
            "tokens_per_round": self.tokens_per_round,
            "tokens_per_s": self.tokens_per_s,
            "total_s": self.total_s,
        }

    def to_pandas(self) -> Any:
        """A data frame of one row, for `pandas.concat` of those of several calls.

        Columns are the numbers and texts of `as_dict()`, "acceptance_1", "acceptance_2", ... for the positions in the
        draft, and "compiled" and "fallbacks" as one text each.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        row: dict[str, Any] = {}
        for name, value in self.as_dict().items():
            if name in ("compiled", "fallbacks"):
                row[name] = "; ".join(value)
            elif not isinstance(value, dict | list):
                row[name] = value
        row |= {f"acceptance_{at}": share for at, share in enumerate(self.acceptance_by_position, 1)}
        return import_extra("pandas", "plot").DataFrame([row])

    def summary(self) -> str:
        """One line: tokens, rounds, acceptance, seconds."""
        if not self.num_rounds:
            return f"{self.verifier or 'no'} verification: no rounds in {self.total_s:.2f} s"
        return (
            f"{self.verifier} verification: {self.num_emitted} tokens in {self.num_rounds} rounds, "
            f"{self.tokens_per_round:.2f} a round, acceptance {self.acceptance:.3f}, "
            f"{self.total_s:.2f} s, {self.tokens_per_s:.1f} tokens/s"
        )

    def as_table(self) -> rich.table.Table:
        """A table of rich's; `rich.print(stats)` shows the same."""
        table = rich.table.Table(title=f"{self.verifier or 'no'} verification", show_header=False)
        total_s = self.total_s
        rows = [
            ("tokens", f"{self.num_emitted} in {self.num_rounds} rounds"),
            ("tokens a round", f"{self.tokens_per_round:.2f}"),
            ("tokens a second", f"{self.tokens_per_s:.1f}"),
            ("acceptance", f"{self.acceptance:.3f} ({self._counts})"),
            ("acceptance by position", self._positions),
            ("rounds by draft length", self._lens),
            *(
                (stage, f"{seconds:.3f} s, {seconds / total_s if total_s else 0.0:.0%}")
                for stage, seconds in self.seconds_by_stage.items()
            ),
            ("host synchronisations", self._host_syncs),
            *([("compiled", ", ".join(self.compiled))] if self.compiled else []),
            *([("rows", "moved in lock step")] if self.lock_step else []),
            *(("fallback", reason) for reason in self.fallbacks),
        ]
        for name, value in rows:
            table.add_row(name, rich.markup.escape(value))
        return table

    def plot(self) -> Any:
        """Acceptance by position, drafted tokens by round, and seconds by stage, side by side.

        Returns:
            A `matplotlib.figure.Figure` that belongs to no window: `figure.savefig("stats.png")` writes it, a notebook
            shows it.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return figure_of(self.acceptance_by_position, self.draft_lens, self.num_batch_rounds, self.seconds_by_stage)

    def __rich__(self) -> rich.table.Table:
        return self.as_table()

    def __str__(self) -> str:
        seconds = " ".join(f"{stage} {seconds:.3f}" for stage, seconds in self.seconds_by_stage.items())
        lines = [
            f"{self.verifier or 'no'} verification: {self.num_emitted} tokens in {self.num_rounds} rounds",
            f"tokens a round {self.tokens_per_round:.2f}, acceptance {self.acceptance:.3f} ({self._counts})",
            f"acceptance by position: {self._positions}",
            f"rounds by draft length: {self._lens}",
            f"seconds: {seconds}",
            f"host synchronisations: {self._host_syncs}",
        ]
        if self.compiled:
            lines.append(f"compiled: {', '.join(self.compiled)}")
        if self.lock_step:
            lines.append("rows moved in lock step")
        return "\n".join(lines + [f"fallback: {reason}" for reason in self.fallbacks])

    @property
    def _counts(self) -> str:
        return f"{self.num_accepted} of {self.num_judged} judged, {self.num_drafted} drafted"

    @property
    def _positions(self) -> str:
        return " ".join(f"{share:.2f}" for share in self.acceptance_by_position) or "-"

    @property
    def _lens(self) -> str:
        return " ".join(f"{num}:{count}" for num, count in sorted(self.rounds_by_draft_len.items())) or "-"

    @property
    def _host_syncs(self) -> str:
        return f"{self.num_host_syncs} ours, {self.num_user_host_syncs} in user code"
