"""Everything that can go wrong between peers, in one tree.

SwarmError
  TransportError            the wire
    DaemonDied                p2pd ended by itself: this peer has to be opened anew
    PeerUnreachable           dialled, and nobody answered
    UnknownProtocol           the peer is there and does not speak that protocol: of another release, or just starting
    StreamBroken              the other end vanished: reset, timeout, dead process
    StreamClosed              the other end finished cleanly (end of stream)
    FrameError                bytes that are not a frame, or exceed a cap: the sender's fault
  RecordError               a record that is unsigned, forged, expired, oversized or of an unknown version
    Forged                    what is said to be signed by somebody who did not
  StaleTerm                 a frame from a peer that no longer owns what it speaks for
  BlobError                 a blob nobody has, or whose bytes do not match its digest
  QuotaExceeded             the disk or memory quota would be passed
  IdentityError (ValueError)  the identity file cannot be used; says what to do
  SwarmKeyError (ValueError)  the file of a swarm's key cannot be used; says what to do
  ClosedSwarm (ValueError)  there are peers, and none of them takes us for a member of its swarm
  RemoteError               the other peer answered with an error of its own; carries its one-line text
    NotAdmitted             the job is not for everybody, and we showed nothing that lets us; or the peer asked may not itself
"""

from __future__ import annotations


class SwarmError(Exception):
    pass


class TransportError(SwarmError):
    pass


class DaemonDied(TransportError):
    pass


class PeerUnreachable(TransportError):
    pass


class UnknownProtocol(TransportError):
    pass


class StreamBroken(TransportError):
    pass


class StreamClosed(TransportError):
    pass


class FrameError(TransportError):
    pass


class RecordError(SwarmError):
    pass


class Forged(RecordError):
    pass


class StaleTerm(SwarmError):
    pass


class BlobError(SwarmError):
    pass


class QuotaExceeded(SwarmError):
    pass


class IdentityError(SwarmError, ValueError):
    pass


class SwarmKeyError(SwarmError, ValueError):
    pass


class ClosedSwarm(SwarmError, ValueError):
    pass


class RemoteError(SwarmError):
    pass


class NotAdmitted(RemoteError):
    """`job`: which job it is; `ask`: peers that take part in it, where the one that was asked does not itself."""

    def __init__(self, message: str, job: str, ask: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.job = job
        self.ask = ask
