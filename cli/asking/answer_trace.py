"""Timing of an answer, as the client saw it, and its route."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusion.cli.terminal.output import percentile, seconds_text
from fusion.swarm.identity import friendly_name

if TYPE_CHECKING:
    from fusion.runtime.serving.requests.request import Answer
    from fusion.swarm.transport import PeerId

NAME_WIDTH = 22  # of a row's name


@dataclass
class AnswerTrace:
    """Made when the question is sent."""

    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    times: list[float] = field(default_factory=list)  # of each token

    def __post_init__(self) -> None:
        self.began = self.clock()

    def token(self) -> None:
        """One has come."""
        self.times.append(self.clock())

    @property
    def first_seconds(self) -> float | None:
        """From the question to the first token."""
        return self.times[0] - self.began if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float | None:
        """Of those after the first."""
        whole = sum(self.gaps)
        return len(self.gaps) / whole if whole > 0 else None

    def record(self) -> dict[str, Any]:
        from statistics import median  # only now: it loads fractions and decimals

        gaps = self.gaps
        return {
            "first_token_seconds": self.first_seconds,
            "tokens_per_second": self.tokens_per_second,
            "gap_p50_seconds": median(gaps) if gaps else None,
            "gap_p95_seconds": percentile(gaps, 0.95),
        }


def table(trace: AnswerTrace, answer: Answer) -> str:
    """A row a line; "-" for what one answer does not tell."""
    found = trace.record()
    rate = found["tokens_per_second"]
    rows = [
        ("time to first token", _seconds(found["first_token_seconds"])),
        ("tokens a second", "-" if rate is None else f"{rate:.1f}"),
        (
            "between tokens",
            f"p50 {_seconds(found['gap_p50_seconds'])}, p95 {_seconds(found['gap_p95_seconds'])}",
        ),
        ("tokens", f"{len(answer.tokens)} after a prompt of {answer.prompt_tokens}{_reused(answer)}"),
        *(("route" if stage == 0 else "", text) for stage, text in enumerate(route_lines(answer.route))),
    ]
    return "\n".join(f"{name:<{NAME_WIDTH}}{value}" for name, value in rows)


def route_lines(route: Sequence[PeerId], trips: Sequence[float | None] = ()) -> list[str]:
    """A line a stage, e.g. "stage 1  brave-lynx-01  3.1 ms to stage 2"; `trips`: seconds of the round trip from each to the
    next, as far as it is known."""
    lines = []
    for stage, peer in enumerate(route):
        seconds = trips[stage] if stage < len(trips) else None
        after = (stage + 1) % len(route)
        way = "" if seconds is None else f"  {seconds_text(seconds)} to stage {after} and back"
        lines.append(f"stage {stage}  {friendly_name(peer)}{way}")
    return lines


def answer_record(answer: Answer) -> dict[str, Any]:
    """As --json prints it."""
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "route": list(answer.route),
        "seconds": round(answer.seconds, 4),
    }


def _reused(answer: Answer) -> str:
    return f", {answer.cached_tokens} of them read before" if answer.cached_tokens else ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)
