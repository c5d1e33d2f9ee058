"""A cache of the records read under a key that all peers or jobs share, until they expire: so no single reply needs to have all of
them. Pure.

Where it is full, those who report records have equal shares, since peer ids are free: a node that reports a thousand records of
its own displaces none that others report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from fusion.swarm.dht.values import MAX_SUBKEYS
from fusion.swarm.directory.sealing import Sealed

_REPORTERS = 16  # remembered of each record


class Remembered:
    """The records of one key, by subkey, and the accounts that reported them: peers, or their public networks."""

    def __init__(self, most: int = MAX_SUBKEYS) -> None:
        self._most = most
        self._records: dict[str, Sealed] = {}  # oldest first
        self._reported_by: dict[str, tuple[str, ...]] = {}  # the first ones

    def valid(self, now: float) -> dict[str, Sealed]:
        return {subkey: sealed for subkey, sealed in self._records.items() if sealed.is_valid(now)}

    def add(
        self, records: Mapping[str, Sealed], reported_by: Mapping[str, Collection[str]], now: float
    ) -> None:
        """Add checked records; of two under one subkey the one that expires later stays."""
        merged = self.valid(now)
        for subkey, sealed in records.items():
            if subkey not in merged or sealed.expires_at > merged[subkey].expires_at:
                merged[subkey] = sealed
        reporters = {
            subkey: tuple(dict.fromkeys((*self._reported_by.get(subkey, ()), *reported_by.get(subkey, ()))))
            for subkey in merged
        }
        kept = merged if len(merged) <= self._most else fair_share(reporters, self._most)
        self._records = {subkey: merged[subkey] for subkey in kept}
        self._reported_by = {subkey: reporters[subkey][:_REPORTERS] for subkey in kept}


def fair_share(reported_by: Mapping[str, Collection[str]], most: int) -> list[str]:
    """At most `most` of the names: as many of each account as its equal share, then the oldest of the rest (the order of
    `reported_by`). A name that several report counts against the account with most of its share left."""
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
