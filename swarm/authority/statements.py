"""What a peer states about a job (state, term, checkpoint), signed so that others can carry it. Pure.

A record in the directory speaks for its author and soon expires. A statement speaks for its signer for as long as any peer
carries it in the `proof` of its own job record.

A statement is `msgpack([1, job, state, term, step, snapshot, snapshot_step, signer, at, signature])`, about 210 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fusion.swarm.authority.signed import MAX_TIME, VERSION, SignedForm, verified_items
from fusion.swarm.directory.records import (
    MAX_PROOF_BYTES,
    MAX_STEP,
    MAX_TERM,
    Digest,
    JobId,
    JobRecord,
    is_digest,
)
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

FORM = SignedForm(name="statement", signer="signer", max_bytes=MAX_PROOF_BYTES, max_items=10)
CARRIED = 12  # in one record, which has to stay below 4 KiB
State = Literal["launching", "running", "done", "stopped", "failed"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, kw_only=True)
class Statement:
    job: JobId
    state: State
    term: int  # of the lead, as the signer knows it
    step: int
    snapshot: Digest | None
    snapshot_step: int  # -1 while there is none
    signer: PeerId
    at: int  # unix seconds, orders the statements of one signer

    def __post_init__(self) -> None:
        if not is_digest(self.job) or not (self.snapshot is None or is_digest(self.snapshot)):
            raise RecordError("a statement is about one job, and names its snapshot by a digest")
        if self.state not in STATES or not 0 < len(self.signer) <= 64:
            raise RecordError("a statement says how a job stands, and is signed by a peer")
        whole = {
            "term": (0, MAX_TERM),
            "step": (0, MAX_STEP),
            "snapshot_step": (-1, MAX_STEP),
            "at": (0, MAX_TIME),
        }
        for name, (least, most) in whole.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise RecordError(f"a statement with a bad {name}")


def statement_of(record: JobRecord, signer: PeerId, at: float) -> Statement:
    """The statement that `signer` makes by this record, at unix time `at`."""
    return Statement(
        job=record.job, state=record.state, term=record.term, step=record.step, snapshot=record.snapshot,
        snapshot_step=record.snapshot_step, signer=signer, at=int(at),
    )  # fmt: skip


def stop_statement(job: JobId, author: PeerId, at: float) -> Statement:
    """What the author of a job signs to end it; it names no checkpoint."""
    return Statement(
        job=job, state="stopped", term=0, step=0, snapshot=None, snapshot_step=-1, signer=author, at=int(at)
    )


def seal_statement(statement: Statement, sign: Callable[[bytes], bytes]) -> bytes:
    """The bytes of a statement; `sign` signs with its signer's key."""
    return FORM.seal(_fields(statement), sign)


def open_statement(data: bytes, verify: Verify = verify_signature) -> Statement:
    """Raises RecordError for bytes that are no statement, Forged for one that its signer did not sign."""
    statement, signature = _read(data)
    FORM.check(statement.signer, signature, _fields(statement), verify)
    return statement


@recent(4096)  # records come back every heartbeat with the same ones
def _read(data: bytes) -> tuple[Statement, bytes]:
    """The statement and its signature, not yet verified. Raises RecordError."""
    match FORM.unpack(data):
        case [int(version), bytes(job), int(state), int(term), int(step), bytes() | None as snapshot, int(snapshot_step),
              str(signer), int(at), bytes(signature)] if version == VERSION and 0 <= state < len(STATES):  # fmt: skip
            statement = Statement(
                job=JobId(job.hex()), state=STATES[state], term=term, step=step,
                snapshot=None if snapshot is None else Digest(snapshot.hex()), snapshot_step=snapshot_step,
                signer=PeerId(signer), at=at,
            )  # fmt: skip
        case _:
            raise FORM.malformed()
    return statement, signature


def open_statements(
    proof: Iterable[bytes],
    job: JobId,
    verify: Verify = verify_signature,
    matters: Callable[[Statement], bool] = lambda statement: True,
) -> list[tuple[Statement, bytes]]:
    """The statements in `proof` about the job that matter and verify (`signed.verified_items`), each with its bytes."""
    return list(
        verified_items(
            proof,
            lambda data: _read(data)[0],
            lambda statement: statement.job == job and matters(statement),
            lambda data: open_statement(data, verify),
        )
    )


def latest_statements(
    proofs: Iterable[bytes], job: JobId, verify: Verify = verify_signature
) -> tuple[bytes, ...]:
    """The latest valid statement of each signer, the ends of the job first, at most CARRIED of them."""
    latest: dict[PeerId, tuple[tuple[bool, int, int, int], bytes]] = {}
    for one, data in open_statements(proofs, job, verify):
        rank = (one.state not in ("launching", "running"), one.term, one.at, one.step)
        if one.signer not in latest or rank > latest[one.signer][0]:
            latest[one.signer] = (rank, data)
    order = sorted(latest.items(), key=lambda item: (item[1][0], item[0]), reverse=True)
    return tuple(data for _, (_, data) in order[:CARRIED])


def _fields(statement: Statement) -> list[Any]:
    return [
        *(
            VERSION,
            bytes.fromhex(statement.job),
            STATES.index(statement.state),
            statement.term,
            statement.step,
        ),
        None if statement.snapshot is None else bytes.fromhex(statement.snapshot),
        *(statement.snapshot_step, statement.signer, statement.at),
    ]
