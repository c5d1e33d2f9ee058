"""The form of what a peer signs for others to carry: grants, lists of grants taken back, statements, votes. Pure.

It is `msgpack([*fields, signature])`, bounded in bytes, items and texts before anything is made of it. The Ed25519
signature covers `msgpack(["fusion-" + name, *signed])`, the name so that no form can be taken for another; `signed` are
the fields, or what whoever carries it says beside them.

To check a signature costs a tenth of a millisecond, and whoever likes may send thousands that are none: what was found is
remembered, also of forgeries; whoever reads what others carry asks first whether the signer matters; and who carries one
forgery (`Forged`) is not heard further.
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
    name: str  # as errors and the signature have it
    signer: str  # what whoever signs it is called
    max_bytes: int
    max_items: int  # of a list, the fields and their signature among them
    max_text: int = 64

    def seal(
        self, fields: Sequence[Any], sign: Callable[[bytes], bytes], signed: Sequence[Any] | None = None
    ) -> bytes:
        """The bytes of it; `sign` is that of its signer."""
        signature = sign(self._signed(fields if signed is None else signed))
        data: bytes = msgpack.packb([*fields, signature])
        return data

    def unpack(self, data: bytes) -> Any:
        """What lies in `data`, for whoever knows the fields to match. Raises RecordError."""
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


@recent(8192)  # of some 600 bytes; what others carry comes back every heartbeat
def _verified(verify: Verify, signer: PeerId, signature: bytes, data: bytes) -> bool:
    return verify(signer, signature, data)


Said = TypeVar("Said")


def sound(
    carried: Iterable[bytes],
    told: Callable[[bytes], Said],
    matters: Callable[[Said], bool],
    check: Callable[[bytes], object],
) -> Iterator[tuple[Said, bytes]]:
    """Of what one peer carries, each with its bytes: what has the form that `told` reads, matters, and passes the `check` of its
    signature, which raises Forged; nothing behind the first forgery, for nobody who is honest carries one."""
    for data in carried:
        with suppress(RecordError):
            said = told(data)
            if matters(said):
                try:
                    check(data)
                except Forged:
                    return
                yield said, data
