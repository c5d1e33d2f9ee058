"""A libp2p peer of a few milliseconds: a key, a TLS 1.3 connection, yamux, and one stream after the other; blocking.

    with LightPeer(Identity.generate(), "/ip4/127.0.0.1/tcp/4001/p2p/12D3...") as peer:
        frames = peer.ask("/fusion/status/1", [frame], answers=1)

p2pd costs a process and a third of a second of a core for each identity; a soak needs thousands. It listens nowhere, keeps no
addresses, and resets every stream that the other end opens. Sources: the libp2p specifications (connections, tls) and yamux's.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fusion.swarm.errors import StreamBroken
from fusion.swarm.identity import Identity
from fusion.swarm.streams.dialer import tcp_target
from fusion.swarm.streams.frames import HEAD_BYTES, decode_head, decode_header
from fusion.swarm.streams.peer_ids import to_bytes

SECONDS = 10.0  # for each thing that is waited for
EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")  # libp2p's, in its certificates
SIGNED = b"libp2p-tls-handshake:"
VALID = datetime.timedelta(days=1)
HEAD = struct.Struct(">BBHII")  # yamux: version, type, flags, stream, length
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
FIRST_STREAM = 1  # of those that the dialling end opens: odd
MOST_BYTES = 1 << 24  # of one answer

_KEY = ec.generate_private_key(ec.SECP256R1())  # of all certificates; the identity's own key signs it in each


def _certificate(identity: Identity) -> bytes:
    """A self-signed certificate with its private key, in PEM; its libp2p extension has the identity's signature."""
    public = _KEY.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signature = identity.sign(SIGNED + public)
    signed_key = _der(0x30, _der(0x04, to_bytes(identity.peer_id)[2:]) + _der(0x04, signature))
    name = x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=_KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
        .add_extension(x509.UnrecognizedExtension(EXTENSION, signed_key), critical=False)
        .sign(_KEY, hashes.SHA256())
    )
    key = _KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM) + key


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 0x80 else bytes([0x81, size])
    assert size < 0x100
    return bytes([tag]) + length + content


class LightPeer:
    """A peer that is connected during a `with` block. Raises OSError, StreamBroken."""

    def __init__(self, identity: Identity, address: str) -> None:
        target = tcp_target(address)
        assert target is not None, address
        self._identity, self._target = identity, target
        self._stream = FIRST_STREAM - 2
        self._received: dict[int, bytearray] = {}
        self._ended: set[int] = set()

    def __enter__(self) -> Self:
        plain = socket.create_connection(self._target, timeout=SECONDS)
        try:
            plain.sendall(_said("/multistream/1.0.0") + _said("/tls/1.0.0"))
            for _ in range(2):
                _one_word(plain)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.set_alpn_protocols(["libp2p"])
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "certificate.pem"
                file.write_bytes(_certificate(self._identity))
                context.load_cert_chain(file)
            self._socket = context.wrap_socket(plain)
            self._socket.sendall(_said("/multistream/1.0.0") + _said("/yamux/1.0.0"))
            for _ in range(2):
                _one_word(self._socket)
        except BaseException:
            plain.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, protocol: str, frames: Sequence[bytes], answers: int = 1) -> list[str]:
        """Send frames on a new stream, and return the kinds of the replies: so many, or fewer if the other end closes the
        stream. Raises StreamBroken if it resets the stream."""
        self._stream += 2
        number = self._stream
        self._received[number] = bytearray()
        opening = _said("/multistream/1.0.0") + _said(protocol)
        self._send(DATA, SYN, number, opening)
        for expected in ("/multistream/1.0.0", protocol):
            word = self._word(number)
            if word != expected:
                raise StreamBroken(f"{protocol}: answered with {word!r}")
        self._send(DATA, 0, number, b"".join(frames))
        kinds = []
        while len(kinds) < answers and (kind := self._frame(number)):
            kinds.append(kind)
        self._send(WINDOW, RST if number not in self._ended else FIN, number, b"")
        del self._received[number]
        return kinds

    def _frame(self, number: int) -> str:
        """The kind of the next frame; empty at the end of the stream."""
        if not self._wait(number, HEAD_BYTES):
            return ""
        header, payload = decode_head(bytes(self._received[number][:HEAD_BYTES]))
        if header == 0:
            return ""
        size = HEAD_BYTES + header + payload
        if not self._wait(number, size):
            raise StreamBroken("it ended within a frame")
        kind, _ = decode_header(bytes(self._received[number][HEAD_BYTES : HEAD_BYTES + header]))
        del self._received[number][:size]
        return kind

    def _word(self, number: int) -> str:
        """The next message of multistream-select."""
        if not self._wait(number, 1):
            raise StreamBroken("it ended before it spoke")
        size = self._received[number][0]
        if not self._wait(number, 1 + size):
            raise StreamBroken("it ended within a word")
        word = bytes(self._received[number][1 : 1 + size])
        del self._received[number][: 1 + size]
        return word.decode("utf-8", "replace").strip()

    def _wait(self, number: int, size: int) -> bool:
        """Read until so many bytes have arrived on the stream. False if it ended before."""
        if size > MOST_BYTES:
            raise StreamBroken(f"{size} bytes are more than is waited for")
        while len(self._received[number]) < size:
            if number in self._ended:
                return False
            self._read()
        return True

    def _read(self) -> None:
        """Receive one frame of yamux, and acknowledge it."""
        _, kind, flags, number, length = HEAD.unpack(_exactly(self._socket, HEAD.size))
        if kind == DATA:
            data = _exactly(self._socket, length)
            if number in self._received:
                self._received[number] += data
                self._send(WINDOW, 0, number, b"", length)
        elif kind == PING and flags & SYN:
            self._send(PING, ACK, 0, b"", length)
        elif kind == GO_AWAY:
            raise StreamBroken("the other end goes away")
        if flags & SYN and number % 2 == 0 and number:
            self._send(WINDOW, RST, number, b"")
        if flags & RST and number in self._received:
            raise StreamBroken("the stream was reset")
        if flags & FIN:
            self._ended.add(number)

    def _send(self, kind: int, flags: int, number: int, data: bytes, length: int | None = None) -> None:
        size = len(data) if length is None else length
        self._socket.sendall(HEAD.pack(0, kind, flags, number, size) + data)


def _said(word: str) -> bytes:
    line = word.encode() + b"\n"
    return bytes([len(line)]) + line


def _one_word(connection: socket.socket) -> bytes:
    return _exactly(connection, _exactly(connection, 1)[0])


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(size - len(parts))
        if not data:
            raise StreamBroken("the connection ended")
        parts += data
    return bytes(parts)
