"""Invites: a chain of grants as one line of text, for people to send each other. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgpack

from fusion.swarm.authority.grants import Grant, open_grant
from fusion.swarm.directory.records import MAX_GRANT_BYTES, MAX_GRANTS
from fusion.swarm.errors import RecordError

PREFIX = "fusion-invite:"
MAX_TEXT = len(PREFIX) + 2 * MAX_GRANTS * (MAX_GRANT_BYTES + 8)
NOT_ONE = f"an invite is one line that begins with {PREFIX}, as `fusion-peer jobs invite` prints it"


def to_text(chain: Sequence[bytes]) -> str:
    return PREFIX + base64.urlsafe_b64encode(msgpack.packb(list(chain))).decode().rstrip("=")


def from_text(text: str) -> tuple[bytes, ...]:
    """The chain of grants, each signed by its issuer and for the same job. Raises RecordError in one line."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TEXT:
        raise RecordError(NOT_ONE)
    body = text[len(PREFIX) :]
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        value = msgpack.unpackb(data, max_bin_len=MAX_GRANT_BYTES, max_array_len=MAX_GRANTS, max_map_len=0)
    except (binascii.Error, ValueError, msgpack.UnpackException, RecursionError):
        raise RecordError("the invite is damaged: copy the whole line") from None
    if not isinstance(value, list) or not value or not all(isinstance(item, bytes) for item in value):
        raise RecordError("the invite is damaged: copy the whole line")
    links = [open_grant(item) for item in value]
    if len({link.job for link in links}) != 1:
        raise RecordError("an invite is for one job")
    return tuple(value)


def last_of(chain: Sequence[bytes]) -> Grant:
    """The last grant of the chain, whose subject holds it. Raises RecordError."""
    return open_grant(chain[-1])
