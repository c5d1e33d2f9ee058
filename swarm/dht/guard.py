"""Checks of the records that others ask us to store. Pure.

A record that no reader would accept is not stored either: forged, expired, oversized, of an unknown version, or in a place or
for a time that its author did not sign. hivemind's whole values, values without subkeys and cache entries are refused
unread: ours are records, each under a subkey.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.swarm.dht.values import key_id, parse_subkey
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS, MAX_RECORD_BYTES, unseal_anywhere
from fusion.swarm.errors import RecordError


@dataclass(frozen=True)
class Offer:
    """A record that another node asks us to store, not yet checked. `until` in unix seconds."""

    key: bytes
    subkey: bytes
    data: bytes
    until: float
    in_cache: bool = False


def check_offer(offer: Offer, now: float) -> str:
    """The subkey of the offered record, if it may be stored. Raises RecordError."""
    if offer.in_cache:
        raise RecordError("only for the cache: there is none")
    if len(offer.data) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(offer.data)} bytes; at most {MAX_RECORD_BYTES}")
    subkey = parse_subkey(offer.subkey)
    # With grace for expired records: our clock may be the one that is ahead.
    sealed = unseal_anywhere(offer.data, now, grace_seconds=CLOCK_TOLERANCE_SECONDS)
    place = key_id(key_of(sealed.record)).to_bytes(20, "big")
    if offer.key != place or subkey != subkey_of(sealed.record):
        raise RecordError("not the place of this record")
    if not abs(offer.until - sealed.expires_at - CLOCK_TOLERANCE_SECONDS) <= 1e-3:
        raise RecordError("stored for another time than its author signed")
    return subkey
