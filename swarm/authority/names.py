"""Which job somebody means by a name. Pure.

Names belong to authors: `name` means a job as long as the jobs of that name have one author, `name@author` always (so much of
the author's peer id as tells it from others). Nobody can be kept from a name of their own by strangers who use it too:

* the author whom the reader knows (its own key, or whose model it was asked for before) goes before strangers;
* a job that nobody runs does not stand in the way of one that somebody does;
* where authors are left that the reader cannot tell apart, it says so and names the choices, and takes none. When a job was
  launched does not count: its author says that itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

SHOWN_CHARACTERS = 16  # of an author; all ids of Ed25519 keys begin with the same eight
CHOICES = 5  # named in an error


@dataclass(frozen=True, kw_only=True)
class Named:
    """A job that a name may mean."""

    job: JobId
    name: str  # the manifest's
    author: PeerId | None  # None while the manifest is not here: nobody has the name then
    owned: bool  # whether anybody runs a stage of it
    launched_at: int = 0

    @property
    def full(self) -> str:
        return f"{self.name}@{(self.author or '')[:SHOWN_CHARACTERS]}"


class Ambiguous(ValueError):
    """A name that several jobs have."""


def may_mean(wanted: str, name: str, job: JobId) -> bool:
    """Whether `wanted` may be a name, or the beginning of the id, of a job that somebody calls so."""
    return name in (wanted, wanted.rpartition("@")[0]) or (bool(wanted) and job.startswith(wanted.lower()))


def meant(found: Sequence[Named], wanted: str, known: Collection[PeerId] = ()) -> tuple[Named, ...]:
    """The jobs of one author that are meant, those that somebody runs and the newest first; none where there are none.
    `known`: authors whom the reader knows. Ambiguous names the choices."""
    name, _, author = wanted.rpartition("@")
    fitting = [each for each in found if each.name == wanted and each.author is not None]
    if not fitting and name and author:
        fitting = [
            e for e in found if e.name == name and e.author is not None and e.author.startswith(author)
        ]
    if not fitting:
        fitting = [each for each in found if wanted and each.job.startswith(wanted.lower())]
    ours = [each for each in fitting if each.author in known]
    if ours and not any(each.job == wanted for each in fitting):
        fitting = ours
    running = [each for each in fitting if each.owned]
    authors = {each.author for each in running or fitting}
    if len(authors) > 1:
        choices = sorted({each.full for each in running or fitting})
        raise Ambiguous(
            f"{wanted!r} names jobs of {len(authors)} authors; say which: {', '.join(choices[:CHOICES])}"
        )
    of_author = [each for each in fitting if each.author in authors]
    return tuple(sorted(of_author, key=lambda each: (not each.owned, -each.launched_at, each.job)))
