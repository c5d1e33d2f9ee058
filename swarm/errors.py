"""The errors between peers, in one tree.

SwarmError
  TransportError            the wire
    DaemonDied                p2pd ended by itself: this peer has to be started again
    PeerUnreachable           dialled, and nobody answered
    UnknownProtocol           the peer answers but does not speak that protocol: of another release, or just starting
    StreamBroken              the remote end vanished: reset, timeout, dead process
    StreamClosed              the remote end closed it cleanly (end of stream)
    FrameError                bytes that are not a frame, or exceed a cap: the sender's fault
  RecordError               a record that is unsigned, forged, expired, oversized or of an unknown version
    Forged                    a signature that is not its alleged signer's
  StaleTerm                 a frame from a peer that no longer owns its stage
  BlobError                 a blob nobody has, or whose bytes do not match its digest
  QuotaExceeded             the disk or memory quota would be passed
  IdentityError (ValueError)  the identity file cannot be used; names the remedy
  SwarmKeyError (ValueError)  the file of a swarm's key cannot be used; names the remedy
  ClosedSwarm (ValueError)  peers answer, but we are no member of their swarm
  RemoteError               the other peer answered with an error of its own; carries its one-line text
    NotAdmitted             the job is not open, and we showed no grant that admits us; or the remote peer is not admitted
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
    """`job`: the job's id; `ask`: peers that take part in it, where the remote one does not."""

    def __init__(self, message: str, job: str, ask: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.job = job
        self.ask = ask
