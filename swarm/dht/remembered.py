"""What was read under a key that all peers or jobs share, until it ends: so no answer needs to have all of it. Pure.

Where it is too much, room is shared out among those who report it, as names are free: a node that reports a thousand of its own
keeps out nothing that others report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from fusion.swarm.dht.values import MAX_SUBKEYS
from fusion.swarm.directory.sealing import Sealed

_REPORTERS = 16  # remembered of each record


class Remembered:
    """The records of one key, by subkey. Those who report them are accounts: peers, or the networks that they are in."""

    def __init__(self, most: int = MAX_SUBKEYS) -> None:
        self._most = most
        self._records: dict[str, Sealed] = {}  # known longest first
        self._reported_by: dict[str, tuple[str, ...]] = {}  # those that did first

    def good(self, now: float) -> dict[str, Sealed]:
        return {subkey: sealed for subkey, sealed in self._records.items() if sealed.is_good(now)}

    def add(
        self, records: Mapping[str, Sealed], reported_by: Mapping[str, Collection[str]], now: float
    ) -> None:
        """Checked records; of two under one subkey the one that ends later stays."""
        merged = self.good(now)
        for subkey, sealed in records.items():
            if subkey not in merged or sealed.expires_at > merged[subkey].expires_at:
                merged[subkey] = sealed
        reporters = {
            subkey: tuple(dict.fromkeys((*self._reported_by.get(subkey, ()), *reported_by.get(subkey, ()))))
            for subkey in merged
        }
        kept = merged if len(merged) <= self._most else fairly(reporters, self._most)
        self._records = {subkey: merged[subkey] for subkey in kept}
        self._reported_by = {subkey: reporters[subkey][:_REPORTERS] for subkey in kept}


def fairly(reported_by: Mapping[str, Collection[str]], most: int) -> list[str]:
    """At most so many of the names: of what each account reports as many as its share, and of the rest those known longest, which
    come first. A name that several report takes the share of the one that has most of it left."""
    accounts = {account for reporters in reported_by.values() for account in reporters}
    share = most // max(1, len(accounts))
    taken: Counter[str] = Counter()
    kept, rest = [], []
    for name, reporters in reported_by.items():
        account = min(reporters, key=lambda reporter: (taken[reporter], reporter), default=None)
        if account is not None and taken[account] < share:
            taken[account] += 1
            kept.append(name)
        else:
            rest.append(name)
    chosen = {*kept, *rest[: most - len(kept)]}
    return [name for name in reported_by if name in chosen]
