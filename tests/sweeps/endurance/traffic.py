"""The traffic of eight strangers, as a pure function of a seed: frames of every protocol, and records for the directory.

Frames are made from recorded ones (tests/runtime/recorded/frames.txt) or `plain` ones. Each talk names the attacked job and
peers or those of the recording. It is replayed unchanged, or with other header values (types, sizes, nesting, extremes, and
values of Hypothesis), bytes or lengths. Records are sealed with the strangers' own keys, without the publisher's checks.
"""

from __future__ import annotations

import copy
import hashlib
import random
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.directory_records import (
    claim_record,
    job_record,
    link_record,
    peer_record,
    provider_record,
    raw_seal,
)
from sweeps.endurance.recording import Message, plain, recorded

from fusion.runtime.job.protocol import GENERATE, HOLD, JOB, RING, STAGE, STATUS
from fusion.swarm.directory import records
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import Digest, JobId, Record
from fusion.swarm.identity import Identity
from fusion.swarm.protocol import BLOB, PROBE

PROTOCOLS = tuple(each.name for each in (STAGE, RING, GENERATE, JOB, HOLD, STATUS, BLOB, PROBE))
TALK_FRAMES = 12  # at most, on one stream
INVENTED = 250  # values of hypothesis's that are mixed in
NOBODYS = tuple(JobId(hashlib.sha256(f"nobody's {n}".encode()).hexdigest()) for n in range(64))
RIGHTS = frozenset({STAGE.name, HOLD.name, JOB.name})  # protocols on which a job is taken or ended
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1),
    *(1e308, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324),
    *("", "x\nimport os", "\x1b[2J\u202e", "x" * 4096, "../../identity", b"", b"\xff" * 64, b"\x00" * 4096),
    *([], {}, [[1]], [0] * 5000, [[]] * 3000, {"a": 1}, {"job": {}}),
)  # fmt: skip


@dataclass(frozen=True)
class Talk:
    """The frames that are written on one stream."""

    protocol: str
    frames: tuple[bytes, ...]
    what: str


@dataclass(frozen=True)
class Sealed:
    """A record that is offered to a node to be stored under `key`."""

    key: str
    subkey: str
    data: bytes
    until: float
    what: str


@dataclass(frozen=True)
class Targets:
    """The jobs and peers that the traffic names."""

    jobs: tuple[JobId, ...]
    owners: tuple[str, ...]
    author: str
    spared: bool = False  # what claims, takes or ends a job speaks of jobs that nobody runs


def identity_of(number: int, of_seed: int) -> Identity:
    """The key of stranger `number`, the same for the same seed."""
    key = hashlib.sha256(f"stranger {of_seed} {number}".encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(key), None)


def invented(of_seed: int, count: int = INVENTED) -> list[Any]:
    """Nested and unusual values that msgpack can encode, drawn by Hypothesis."""
    found: list[Any] = []
    simple = (
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
    )
    values = st.recursive(
        simple, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
    )

    @seed(of_seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(values)
    def collect(value: Any) -> None:
        found.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return found


def packed(message: Message) -> bytes:
    kind, header, payload = message
    head: bytes = msgpack.packb([kind, header])
    return struct.pack(">IQ", len(head), len(payload)) + head + payload


class Traffic:
    """The traffic of one stranger: `talk` and `record`, each call the next of its sequence."""

    def __init__(self, of_seed: int, number: int, targets: Targets, values: Sequence[Any]) -> None:
        self.identity = identity_of(number, of_seed)
        self._others = [identity_of(each, of_seed) for each in range(8)]
        self._chance = random.Random(f"{of_seed} {number}")
        self._targets = targets
        self._values = [*EXTREMES, *values]
        streams = recorded()
        self._by_protocol: dict[str, list[list[Message]]] = {}
        for protocol, said in (*streams, *plain()):
            self._by_protocol.setdefault(protocol, []).append(said)

    def talk(self) -> Talk:
        chance = self._chance
        protocol = chance.choice(tuple(self._by_protocol))
        said = chance.choice(self._by_protocol[protocol])
        begin = 0 if chance.random() < 0.8 else chance.randrange(len(said))
        messages = copy.deepcopy(said[begin : begin + TALK_FRAMES])
        while len(messages) < TALK_FRAMES and chance.random() < 0.8:
            messages.append(copy.deepcopy(chance.choice(said)))
        if chance.random() < 0.6:
            messages = [self._aimed(protocol, message) for message in messages]
        how = chance.choices(("replay", "values", "bytes", "lengths", "noise"), (2, 10, 4, 2, 1))[0]
        frames = [packed(message) for message in messages]
        if how == "values":
            # The first one as it was, in most talks: what follows is only heard behind a good beginning.
            first = 1 if len(messages) > 1 and chance.random() < 0.7 else 0
            frames = [packed(m) if at < first else self._changed(m) for at, m in enumerate(messages)]
        elif how == "bytes":
            frames = [self._flipped(frame) for frame in frames]
        elif how == "lengths":
            frames = [self._mislaid(frame) for frame in frames]
        elif how == "noise":
            frames = [chance.randbytes(chance.randrange(1, 300)) for _ in frames]
        return Talk(protocol, tuple(frames), f"{protocol} {how} {messages[0][0]} x{len(frames)}")

    def record(self, now: float) -> Sealed:
        """The next record for the directory; `now` in unix seconds."""
        chance = self._chance
        signer = self.identity if chance.random() < 0.8 else chance.choice(self._others)
        record = self._lie(signer)
        until = now + chance.choice((-10.0, 1.0, 5.0, 30.0, 100.0, 118.0, 1e6))
        changes: dict[str, Any] = {}
        if chance.random() < 0.5:
            names = [field.name for field in fields(record)]
            changes["values"] = {chance.choice(names): self._value() for _ in range(chance.randrange(1, 3))}
        if chance.random() < 0.1:
            changes["version"] = chance.choice((0, 1, 2, 3, 99, -1, 2**63, "2", None))
        if chance.random() < 0.1:
            changes["kind"] = chance.choice(("peer", "job", "claim", "king", "", 7, None))
        if chance.random() < 0.2:
            changes["author"] = chance.choice((*self._targets.owners, self._targets.author, "x"))
        try:
            data = raw_seal(record, signer, until, **changes)
        except (ValueError, TypeError, OverflowError):
            data = raw_seal(record, signer, until)
        if chance.random() < 0.15:
            data = self._flipped(data)
        key, subkey = key_of(record), subkey_of(record)
        if chance.random() < 0.1:
            key = key_of(self._lie(signer))
        if chance.random() < 0.1:
            subkey = chance.choice((*self._targets.owners, "", "x" * 300))
        what = f"{type(record).__name__} {sorted(changes)} {sorted(changes.get('values', ()))}"
        return Sealed(key, subkey, data, until, what)

    def _lie(self, signer: Identity) -> Record:
        chance, targets = self._chance, self._targets
        job, stage = chance.choice(NOBODYS if targets.spared else targets.jobs), chance.randrange(3)
        term = chance.choice((0, 1, 2, 3, 100, records.MAX_TERM))
        match chance.randrange(5):
            case 0:
                return peer_record(
                    signer, flops_per_second=chance.choice((0.0, 1e15, 1e21)), memory_bytes=2**53
                )
            case 1:
                names = ("hostile",) if targets.spared else ("training", "answers")
                state = chance.choice(("launching", "running", "done", "stopped", "failed"))
                lead = chance.choice((signer.peer_id, *targets.owners))
                return job_record(
                    signer, job=job, name=chance.choice(names), state=state, term=term,
                    step=chance.choice((0, 2**53)), lead=lead, snapshot=self._digest(), snapshot_step=2**40, stages=2,
                )  # fmt: skip
            case 2:
                role = chance.choice(("owner", "replica", "standby", "released"))
                return claim_record(
                    signer, job=job, stage=stage, role=role, term=term, step=2**50, ready=True
                )
            case 3:
                return provider_record(signer, digest=chance.choice((Digest(job), self._digest())))
            case _:
                return link_record(signer)

    def _digest(self) -> Digest:
        return Digest(hashlib.sha256(self._chance.randbytes(4)).hexdigest())

    def _aimed(self, protocol: str, message: Message) -> Message:
        """Replace the recorded jobs and peers by the attacked ones."""
        kind, header, payload = message
        chance = self._chance
        jobs = NOBODYS if self._targets.spared and protocol in RIGHTS else self._targets.jobs
        for name in header:
            if name == "job":
                header[name] = chance.choice(jobs)
            elif name in ("peer", "lead"):
                header[name] = chance.choice((*self._targets.owners, self.identity.peer_id))
            elif name in ("term", "target_term") and chance.random() < 0.3:
                header[name] = chance.choice((0, 1, 2, 100, records.MAX_TERM))
        return kind, header, payload

    def _changed(self, message: Message) -> bytes:
        """Change, remove or repeat one or more values, at any depth; the kind may change too."""
        kind, header, payload = message
        chance = self._chance
        for _ in range(chance.randrange(1, 4)):
            inner: Any = header
            while isinstance(inner, dict | list) and inner:
                name = chance.choice(list(inner)) if isinstance(inner, dict) else chance.randrange(len(inner))
                value = inner[name]
                if isinstance(value, dict | list) and value and chance.random() < 0.6:
                    inner = value
                    continue
                if chance.random() < 0.15:
                    del inner[name]
                else:
                    inner[name] = self._value(value)
                break
        if chance.random() < 0.1:
            kind = chance.choice(("exec", "commit", "take", "stop", "open", "k" * 64, "", "\x1b[2J"))
        if chance.random() < 0.2:
            payload = chance.randbytes(chance.choice((0, 1, 7, 64, 4096)))
        try:
            return packed((kind, header, payload))
        except (ValueError, TypeError, OverflowError):
            return packed((kind, {}, payload))

    def _value(self, old: Any = None) -> Any:
        chance = self._chance
        if isinstance(old, int | float) and not isinstance(old, bool) and chance.random() < 0.5:
            return old + chance.choice((1, -1, 2, 0.5, 1000))
        if isinstance(old, str | bytes) and old and chance.random() < 0.3:
            return old[: chance.randrange(len(old))] * chance.choice((1, 2, 3))
        if chance.random() < 0.03:
            deep: Any = []
            for _ in range(chance.choice((10, 17, 200))):
                deep = [deep] if chance.random() < 0.7 else {"x": deep}
            return deep
        return copy.deepcopy(chance.choice(self._values))

    def _flipped(self, data: bytes) -> bytes:
        chance, changed = self._chance, bytearray(data)
        for _ in range(chance.randrange(1, 5)):
            at = chance.randrange(len(changed)) if changed else 0
            match chance.randrange(4):
                case 0 if changed:
                    changed[at] ^= 1 << chance.randrange(8)
                case 1:
                    changed[at:at] = chance.randbytes(chance.randrange(1, 9))
                case 2:
                    del changed[at : at + chance.randrange(1, 9)]
                case _ if changed:
                    changed[at] = chance.choice((0x00, 0x7F, 0x80, 0xC1, 0xC7, 0xC9, 0xDD, 0xDF, 0xFF))
        return bytes(changed)

    def _mislaid(self, frame: bytes) -> bytes:
        """Write length prefixes that differ from the lengths of what follows."""
        head, payload = struct.unpack_from(">IQ", frame)
        lies = (0, 1, head - 1, head + 1, 2**18, 2**18 + 1, 2**32 - 1)
        sizes = (payload, 0, 1, 2**16, 2**16 + 1, 2**20, 2**63, 2**64 - 1)
        return struct.pack(">IQ", max(0, self._chance.choice(lies)), self._chance.choice(sizes)) + frame[12:]
