"""What others may store with us."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hivemind.utils import MSGPackSerializer
from support import directory_records as some
from support.directory_records import ALICE, claim_record, good_offer, hostile_offers, job_record, peer_record

from fusion.swarm.dht.guard import Offer, check_offer
from fusion.swarm.dht.values import key_id
from fusion.swarm.directory.keys import subkey_of
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS
from fusion.swarm.errors import RecordError

NOW = 1e6


def offered(offer: some.Offer) -> Offer:
    until = offer.expires_at + CLOCK_TOLERANCE_SECONDS
    return Offer(key_id(offer.key).to_bytes(20, "big"), msgpack.packb(offer.subkey), offer.data, until)


@pytest.mark.parametrize("number", range(len(hostile_offers(0.0))))
def test_nothing_hostile_is_kept(number: int) -> None:
    with pytest.raises(RecordError):
        check_offer(offered(hostile_offers(NOW)[number]), NOW)


def test_records_are_kept_for_as_long_as_they_were_signed_and_only_in_their_place() -> None:
    for record in (claim_record(ALICE), peer_record(ALICE), job_record(ALICE), some.provider_record(ALICE)):
        offer = offered(good_offer(record, ALICE, NOW))
        assert check_offer(offer, NOW) == subkey_of(record)
        for change in (
            {"until": offer.until + 1},
            {"until": float("nan")},
            {"subkey": MSGPackSerializer.dumps(None)},  # a value without subkeys
            {"subkey": b""},  # hivemind's mark of a whole dictionary
            {"subkey": msgpack.packb(msgpack.ExtType(0x40, b"\x90"))},
            {"key": bytes(20)},
            {"key": b""},
            {"in_cache": True},
            {"data": offer.data + b"\x00" * 4096},
        ):
            with pytest.raises(RecordError):
                check_offer(replace(offer, **change), NOW)  # type: ignore[arg-type]
