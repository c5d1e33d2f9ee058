"""What was read under a key that all peers or jobs share, until it ends: so no answer needs to have all of it. Pure.

Where it is too much, room is shared out among those who tell it, as names are free: a node that tells a thousand of its own
keeps out nothing that others tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from fusion.swarm.dht.values import MAX_SUBKEYS
from fusion.swarm.directory.sealing import Sealed

_TELLERS = 16  # remembered of each record


class Remembered:
    """The records of one key, by subkey. Those who tell them are accounts: peers, or the networks that they are in."""

    def __init__(self, most: int = MAX_SUBKEYS) -> None:
        self._most = most
        self._records: dict[str, Sealed] = {}  # known longest first
        self._told_by: dict[str, frozenset[str]] = {}

    def good(self, now: float) -> dict[str, Sealed]:
        return {subkey: sealed for subkey, sealed in self._records.items() if sealed.is_good(now)}

    def add(self, records: Mapping[str, Sealed], told_by: Mapping[str, Collection[str]], now: float) -> None:
        """Checked records; of two under one subkey the one that ends later stays."""
        merged = self.good(now)
        for subkey, sealed in records.items():
            if subkey not in merged or sealed.expires_at > merged[subkey].expires_at:
                merged[subkey] = sealed
        tellers = {
            subkey: frozenset(sorted({*self._told_by.get(subkey, ()), *told_by.get(subkey, ())})[:_TELLERS])
            for subkey in merged
        }
        kept = merged if len(merged) <= self._most else fairly(tellers, self._most)
        self._records = {subkey: merged[subkey] for subkey in kept}
        self._told_by = {subkey: tellers[subkey] for subkey in kept}


def fairly(told_by: Mapping[str, Collection[str]], most: int) -> list[str]:
    """At most so many of the names: of what each account tells as many as its share, and of the rest those known longest, which
    come first. A name that several tell takes the share of the one that has most of it left."""
    accounts = {account for tellers in told_by.values() for account in tellers}
    share = most // max(1, len(accounts))
    taken: Counter[str] = Counter()
    kept, rest = [], []
    for name, tellers in told_by.items():
        account = min(tellers, key=lambda teller: (taken[teller], teller), default=None)
        if account is not None and taken[account] < share:
            taken[account] += 1
            kept.append(name)
        else:
            rest.append(name)
    chosen = {*kept, *rest[: most - len(kept)]}
    return [name for name in told_by if name in chosen]
