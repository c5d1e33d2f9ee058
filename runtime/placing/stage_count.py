"""The number of stages of a served model: as few as give nearly the shortest time per token, and the reason in one line. Pure.

Each further stage adds a link to the path of every token; it pays where one peer has no room for the model, or where it saves more
computing than the link costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fusion.dag.ir.errors import PlacementError

NEAR = 0.05  # share of the time per token below which no stage is added
NAMED = 4  # peers in a line; the others are counted

# The best placement over exactly so many stages, or with None over as many as help. PlacementError where there is none.
PlaceOver = Callable[[int | None], "Candidate"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A placement as the choice sees it. Seconds are predicted, of one token."""

    peers: tuple[str, ...]  # by stage
    token_seconds: float
    link_seconds: float  # of these, on links

    @property
    def stages(self) -> int:
        return len(self.peers)

    def near(self, fastest: Candidate) -> bool:
        """Whether it is nearly as fast."""
        return self.token_seconds <= fastest.token_seconds * (1 + NEAR)


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """`others`: the other candidates, by their number of stages; `misfits`: numbers of stages with which it does not fit."""

    chosen: Candidate
    others: tuple[Candidate, ...] = ()
    misfits: tuple[int, ...] = ()
    asked: bool = False  # the user requested this number
    before: bool = False  # it is the last placement
    of: Literal["token", "run"] = "token"  # that the seconds are of

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        for candidate in (found["chosen"], *found["others"]):
            candidate["stages"] = len(candidate["peers"])
        return found

    def line(self, names: Callable[[str], str]) -> str:
        """For users, with peers by name."""
        chosen = self.chosen
        parts = [f"{_count(chosen.stages)} on {listed([names(p) for p in chosen.peers], NAMED)}"
                f"{', as asked' if self.asked else ''}{', as before' if self.before else ''}: {_text(chosen.token_seconds)} a {self.of} predicted{_links(chosen)}"]  # fmt: skip
        parts += [f"{_count(count)} would not fit" for count in self.misfits]
        parts += [f"{_count(o.stages)} would take {_text(o.token_seconds)}{_links(o)}" for o in self.others]
        return "; ".join(parts)


def fewest(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the fewest stages of those that are nearly as fast as the fastest. There has to be one."""
    fastest = min(candidates, key=lambda each: each.token_seconds)
    near = [each for each in candidates if each.near(fastest)]
    return min(near, key=lambda each: (each.stages, each.token_seconds))


def choose_stages(place: PlaceOver) -> StageChoice:
    """Place the model over any number of stages, then over fewer for as long as that is nearly as fast, and over one more, to show
    its cost. PlacementError where the model does not fit at all."""
    best = place(None)
    found, misfits = {best.stages: best}, list[int]()
    for count in range(best.stages - 1, 0, -1):
        try:
            found[count] = place(count)
        except PlacementError:
            misfits.append(count)
            break
        if fewest([*found.values()]).stages > count:
            break
    more = fewest([*found.values()]).stages + 1
    if more not in found:
        with suppress(PlacementError):  # there are not as many peers, or cuts of the model
            found[more] = place(more)
    chosen = fewest([*found.values()])
    others = tuple(each for _, each in sorted(found.items()) if each is not chosen)
    return StageChoice(chosen=chosen, others=others, misfits=tuple(misfits))


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` of them, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _count(stages: int) -> str:
    return f"{stages} stage{'s' if stages > 1 else ''}"


def _links(candidate: Candidate) -> str:
    return f" ({_text(candidate.link_seconds)} on links)" if candidate.stages > 1 else ""


def _text(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
