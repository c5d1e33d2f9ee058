"""What an attack did to those who were attacked, and whether they withstood it. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

HONEST_SHARE = 0.8  # of quiet that honest users must still get
BLOCK_SECONDS = 0.25
GROWTH_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What honest users got in some seconds."""

    steps: float = 0.0  # committed a second
    tokens: float = 0.0  # answered a second

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


@dataclass(kw_only=True)
class Verdict:
    attack: str
    seconds: float = 0.0  # that it went on for
    lived: bool = True
    before: Rates = Rates()
    during: Rates = Rates()
    after: Rates = Rates()
    operations: int = 0  # of the honest users of the directory
    honest: int = 0  # of these, how many went through
    slowest_seconds: float = 0.0  # of them
    block_seconds: float = 0.0  # the longest, of any peer's loop
    blocked_at: str = ""  # where in the peer's code that was, if it was long enough to be seen
    quiet_block_seconds: float = 0.0
    growth_bytes: int = 0  # the most that any peer grew above quiet
    lent_bytes: int = 0  # the most that any peer set aside for the attack's stages, out of what it lends
    files: int = 0  # the most more open files than in quiet
    share: float = 0.0  # of a core that the attacker used
    quiet_cores: float = 0.0  # that the peers used, all together
    cores: float = 0.0  # the same during the attack
    honest_faults: list[str] = field(
        default_factory=list
    )  # wrong tokens, lost answers, losses that are not the job's own
    notes: dict[str, Any] = field(
        default_factory=dict
    )  # the attacker's, and what a check found: "fault: ..." is one

    @property
    def job_ratio(self) -> float:
        return _ratio(self.during.steps, self.before.steps, self.after.steps)

    @property
    def answer_ratio(self) -> float:
        return _ratio(self.during.tokens, self.before.tokens, self.after.tokens)

    @property
    def faults(self) -> list[str]:
        """Empty: it was withstood."""
        return self.harm + self.slowness

    @property
    def harm(self) -> list[str]:
        """What must not be on any machine, however busy."""
        found = [] if self.lived else ["a peer ended"]
        if self.growth_bytes > GROWTH_BYTES:
            found.append(f"a peer grew by {self.growth_bytes >> 20} MiB")
        told = [f"{name}: {what}" for name, what in self.notes.items() if name.startswith("fault")]
        return found + self.honest_faults + told

    @property
    def slowness(self) -> list[str]:
        """What others' work on the machine could be to blame for as well."""
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
    """To the mean of the quiet around it: a machine with other work changes its pace meanwhile."""
    quiet = (before + after) / 2
    return during / quiet if quiet > 0.0 else 0.0
