"""Which job a name means. Pure.

Names belong to authors: `name` means a job as long as the jobs of that name have one author, `name@author` always (with enough
of the author's peer id to be unique). A stranger who uses the same name cannot take it away:

* an author whom the reader knows (its own key, or one whose model it was asked for before) goes before strangers;
* a job that somebody runs goes before one that nobody runs;
* where several authors are left, the reader raises Ambiguous, which names the choices. When a job was launched does not count: its
  author may declare any time.
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
    author: PeerId | None  # None while the manifest is not here: such a job is found by its id only
    owned: bool  # whether anybody runs a stage of it
    launched_at: int = 0

    @property
    def full(self) -> str:
        return f"{self.name}@{(self.author or '')[:SHOWN_CHARACTERS]}"


class Ambiguous(ValueError):
    """A name that jobs of several authors have."""


def may_mean(wanted: str, name: str, job: JobId) -> bool:
    """Whether `wanted` may mean the job of that id, which a record calls `name`: by the name, or by the id's first digits."""
    return name in (wanted, wanted.rpartition("@")[0]) or (bool(wanted) and job.startswith(wanted.lower()))


def meant(found: Sequence[Named], wanted: str, known: Collection[PeerId] = ()) -> tuple[Named, ...]:
    """The jobs of one author that `wanted` means, running ones first, then the newest; empty where there are none. `known`: authors
    whom the reader knows. Raises Ambiguous."""
    name, _, author = wanted.rpartition("@")
    fitting = [each for each in found if each.name == wanted and each.author is not None]
    if not fitting and name and author:
        fitting = [
            e for e in found if e.name == name and e.author is not None and e.author.startswith(author)
        ]
    if not fitting:
        fitting = [each for each in found if wanted and each.job.startswith(wanted.lower())]
    by_known = [each for each in fitting if each.author in known]
    if by_known and not any(each.job == wanted for each in fitting):
        fitting = by_known
    running = [each for each in fitting if each.owned]
    authors = {each.author for each in running or fitting}
    if len(authors) > 1:
        choices = sorted({each.full for each in running or fitting})
        raise Ambiguous(
            f"{wanted!r} names jobs of {len(authors)} authors; say which: {', '.join(choices[:CHOICES])}"
        )
    of_author = [each for each in fitting if each.author in authors]
    return tuple(sorted(of_author, key=lambda each: (not each.owned, -each.launched_at, each.job)))
