"""What a speculative call did, counted and timed."""

from dataclasses import dataclass, field, fields


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
            num_accepted: those that the verifier kept.
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

    def __str__(self) -> str:
        seconds = " ".join(
            f"{name} {getattr(self, name + '_s'):.3f}"
            for name in ("prefill", "draft", "score", "verify", "bookkeeping")
        )
        positions = " ".join(f"{share:.2f}" for share in self.acceptance_by_position)
        lens = " ".join(f"{num}:{count}" for num, count in sorted(self.rounds_by_draft_len.items()))
        name = self.verifier or "no"
        counts = f"{self.num_accepted} of {self.num_judged} judged, {self.num_drafted} drafted"
        lines = [
            f"{name} verification: {self.num_emitted} tokens in {self.num_rounds} rounds",
            f"tokens a round {self.tokens_per_round:.2f}, acceptance {self.acceptance:.3f} ({counts})",
            f"acceptance by position: {positions or '-'}",
            f"rounds by draft length: {lens or '-'}",
            f"seconds: {seconds}",
            f"host synchronisations: {self.num_host_syncs} ours, {self.num_user_host_syncs} in user code",
        ]
        if self.compiled:
            lines.append(f"compiled: {', '.join(self.compiled)}")
        if self.lock_step:
            lines.append("rows moved in lock step")
        return "\n".join(lines + [f"fallback: {reason}" for reason in self.fallbacks])
