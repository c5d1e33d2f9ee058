"""The measured effects of an attack on the peers and their honest users, and whether they withstood it. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

HONEST_SHARE = 0.8  # of the quiet rates, which honest users must get during an attack
BLOCK_SECONDS = 0.25
GROWTH_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What honest users get over some seconds."""

    steps: float = 0.0  # committed steps a second
    tokens: float = 0.0  # answered tokens a second

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


@dataclass(kw_only=True)
class Verdict:
    attack: str
    seconds: float = 0.0  # duration of the attack
    lived: bool = True  # no peer's process ended
    before: Rates = Rates()
    during: Rates = Rates()
    after: Rates = Rates()
    operations: int = 0  # operations of the directory's honest users
    honest: int = 0  # operations that succeeded
    slowest_seconds: float = 0.0  # the slowest operation
    block_seconds: float = 0.0  # the longest time that any peer's loop was blocked
    blocked_at: str = ""  # where in the peer's code, if a sample was taken
    quiet_block_seconds: float = 0.0
    growth_bytes: int = 0  # the largest growth of any peer's memory over quiet
    lent_bytes: int = 0  # the most memory that any peer reserved for the attack's stages
    files: int = 0  # the largest growth of any peer's open files over quiet
    share: float = 0.0  # cores that the attacker used
    quiet_cores: float = 0.0  # cores that all peers used in quiet
    cores: float = 0.0  # cores that all peers used during the attack
    # Wrong tokens, lost answers, wrong losses.
    honest_faults: list[str] = field(default_factory=list)
    # The attacker's notes and the check's; keys of faults begin with "fault".
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def job_ratio(self) -> float:
        return _ratio(self.during.steps, self.before.steps, self.after.steps)

    @property
    def answer_ratio(self) -> float:
        return _ratio(self.during.tokens, self.before.tokens, self.after.tokens)

    @property
    def faults(self) -> list[str]:
        """All faults; empty if the attack was withstood."""
        return self.harm + self.slowness

    @property
    def harm(self) -> list[str]:
        """Faults that count on any machine, however busy."""
        found = [] if self.lived else ["a peer ended"]
        if self.growth_bytes > GROWTH_BYTES:
            found.append(f"a peer grew by {self.growth_bytes >> 20} MiB")
        noted = [f"{name}: {what}" for name, what in self.notes.items() if name.startswith("fault")]
        return found + self.honest_faults + noted

    @property
    def slowness(self) -> list[str]:
        """Faults that other work on the machine may have caused as well."""
        found = []
        for what, ratio in (("job", self.job_ratio), ("answers", self.answer_ratio)):
            if ratio < HONEST_SHARE:
                found.append(f"the {what} went on at {ratio:.2f} of quiet")
        if self.honest < HONEST_SHARE * self.operations:
            found.append(f"only {self.honest} of {self.operations} honest operations went through")
        if self.block_seconds > BLOCK_SECONDS:
            found.append(f"a loop was held for {self.block_seconds:.2f} s: {self.blocked_at}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            **{name: getattr(self, name).rounded() for name in ("before", "during", "after")},
            "job_ratio": round(self.job_ratio, 3),
            "answer_ratio": round(self.answer_ratio, 3),
            "held": not self.faults,
            "faults": self.faults,
        }


def _ratio(during: float, before: float, after: float) -> float:
    """`during` over the mean of the quiet rates around it, since the machine's speed drifts."""
    quiet = (before + after) / 2
    return during / quiet if quiet > 0.0 else 0.0
