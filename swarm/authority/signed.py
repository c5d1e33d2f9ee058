"""The form of what a peer signs for others to carry: grants, lists of grants taken back, statements, votes. Pure.

It is `msgpack([*fields, signature])`, bounded in bytes, items and text lengths before it is decoded. The Ed25519 signature
covers `msgpack(["fusion-" + name, *signed])`; the name keeps one form from being taken for another. `signed` are the
fields, or (a vote) what the record that carries it has beside them.

Verifying a signature takes a tenth of a millisecond, and anybody may send thousands of false ones. So results are cached,
also of forgeries; readers verify only signers that matter; and after the first forgery (`Forged`) the rest of what its
carrier sent is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from fusion.swarm.errors import Forged, RecordError
from fusion.swarm.identity import Verify
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

VERSION = 1  # of the forms that carry one
MAX_TIME = 2**40  # unix seconds


@dataclass(frozen=True, kw_only=True)
class SignedForm:
    name: str  # in errors and under the signature
    signer: str  # what errors call the signer
    max_bytes: int
    max_items: int  # of a list, the fields and their signature among them
    max_text: int = 64

    def seal(
        self, fields: Sequence[Any], sign: Callable[[bytes], bytes], signed: Sequence[Any] | None = None
    ) -> bytes:
        """The encoded form, `signed` (by default the fields) under the signature; `sign` signs with the signer's key."""
        signature = sign(self._signed(fields if signed is None else signed))
        data: bytes = msgpack.packb([*fields, signature])
        return data

    def unpack(self, data: bytes) -> Any:
        """The decoded `data`, its fields not yet checked. Raises RecordError."""
        if not isinstance(data, bytes) or len(data) > self.max_bytes:
            raise RecordError(f"a {self.name} has at most {self.max_bytes} bytes")
        try:
            return msgpack.unpackb(
                data,
                max_str_len=self.max_text,
                max_bin_len=64,
                max_array_len=self.max_items,
                max_map_len=0,
                max_ext_len=0,
            )
        except (ValueError, msgpack.UnpackException, RecursionError):
            raise RecordError(f"a {self.name} is not msgpack") from None

    def malformed(self) -> RecordError:
        return RecordError(f"the {self.name} has not the form of one")

    def check(self, signer: PeerId, signature: bytes, signed: Sequence[Any], verify: Verify) -> None:
        """Raises Forged unless `signer` signed that."""
        if not _verified(verify, signer, signature, self._signed(signed)):
            raise Forged(f"the {self.name}'s signature is not its {self.signer}'s")

    def _signed(self, signed: Sequence[Any]) -> bytes:
        data: bytes = msgpack.packb([f"fusion-{self.name}", *signed])
        return data


@recent(8192)  # about 600 bytes each; carried items arrive again with every heartbeat
def _verified(verify: Verify, signer: PeerId, signature: bytes, data: bytes) -> bool:
    return verify(signer, signature, data)


Item = TypeVar("Item")


def verified_items(
    carried: Iterable[bytes],
    parse: Callable[[bytes], Item],
    matters: Callable[[Item], bool],
    check: Callable[[bytes], object],
) -> Iterator[tuple[Item, bytes]]:
    """The items that one peer carries, parsed and each with its bytes: those that `parse` accepts (RecordError where it does not), that
    matter, and whose signature passes `check` (Forged where it does not). Stops at the first forgery: honest peers carry none."""
    for data in carried:
        with suppress(RecordError):
            item = parse(data)
            if matters(item):
                try:
                    check(data)
                except Forged:
                    return
                yield item, data
