"""Grants: which peer may do what in a job, and until when, signed by the issuer. Pure.

The first issuer is the job's author, or a root that the manifest names. The subject of a grant that `delegates` may issue one for
as much or less. A chain has at most MAX_GRANTS of them, and all must allow the request, so that a link only narrows the one
before. A peer carries its chain in its claims, or shows it when it opens a stream.

A grant is `msgpack([1, job, issuer, subject, roles, first, last, from, until, delegates, signature])`, about 220 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.revocation import Revocation
from fusion.swarm.authority.signed import MAX_TIME, VERSION, SignedForm
from fusion.swarm.directory.records import MAX_GRANT_BYTES, MAX_GRANTS, MAX_STAGES, JobId, is_digest
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Signer, Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

FORM = SignedForm(name="grant", signer="issuer", max_bytes=MAX_GRANT_BYTES, max_items=11)

# To own a stage, to stand by for one (or run it beside its owner), to read weights, data and snapshots, to prompt.
Role = Literal["own", "stand-by", "read", "ask"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, kw_only=True)
class Grant:
    job: JobId
    issuer: PeerId
    subject: PeerId
    roles: tuple[Role, ...]
    # The first and the last; not checked for requests that are not about one stage.
    stages: tuple[int, int] = (0, MAX_STAGES)
    valid_from: int  # unix seconds
    valid_until: int
    delegates: bool = False  # the subject may pass it on

    def __post_init__(self) -> None:
        whole = (*self.stages, self.valid_from, self.valid_until)
        if not all(type(number) is int for number in whole):
            raise RecordError("a grant counts stages and seconds in whole numbers")
        if not 0 <= self.stages[0] <= self.stages[1] <= MAX_STAGES:
            raise RecordError("a grant is for the stages from a first to a last")
        if not 0 <= self.valid_from < self.valid_until <= MAX_TIME:
            raise RecordError("a grant begins before it ends")
        if not self.roles or not set(self.roles) <= set(ROLES):
            raise RecordError(f"a grant is for some of {', '.join(ROLES)}")
        if not is_digest(self.job) or not isinstance(self.delegates, bool):
            raise RecordError("a grant is for one job, and says whether it may be passed on")

    def refusal(self, job: JobId, role: Role, stage: int | None, now: float) -> str | None:
        """Why the grant does not allow that; None where it does."""
        if self.job != job:
            return "it is for another job"
        if role not in self.roles:
            return f"it is not to {role}"
        if stage is not None and not self.stages[0] <= stage <= self.stages[1]:
            return f"it is not for stage {stage}"
        if now >= self.valid_until:
            return "it has expired"
        return "it is not valid yet" if now < self.valid_from else None


def seal_grant(grant: Grant, issuer: Signer) -> bytes:
    """The grant, signed by `issuer`. RecordError where the grant names another issuer."""
    if grant.issuer != issuer.peer_id:
        raise RecordError(f"a grant of {grant.issuer} cannot be signed by {issuer.peer_id}")
    return FORM.seal(_fields(grant), issuer.sign)


@recent(4096)  # claims come back every heartbeat with the same chain
def open_grant(data: bytes, verify: Verify = verify_signature) -> Grant:
    """Raises RecordError for bytes that are no grant, or one that its issuer did not sign."""
    match FORM.unpack(data):
        case [int(version), bytes(job), str(issuer), str(subject), int(roles), int(first), int(last), int(since),
              int(until), bool(delegates), bytes(signature)] if version == VERSION and 0 < roles < 1 << len(ROLES):  # fmt: skip
            grant = Grant(
                job=JobId(job.hex()), issuer=PeerId(issuer), subject=PeerId(subject),
                roles=tuple(role for bit, role in enumerate(ROLES) if roles >> bit & 1),
                stages=(first, last), valid_from=since, valid_until=until, delegates=delegates,
            )  # fmt: skip
        case _:
            raise FORM.malformed()
    FORM.check(grant.issuer, signature, _fields(grant), verify)
    return grant


def refusal(
    law: JobLaw,
    chain: Sequence[bytes],
    peer: PeerId,
    role: Role,
    stage: int | None,
    now: float,
    verify: Verify = verify_signature,
    revoked: Iterable[Revocation] = (),
) -> str | None:
    """Why `peer`, which shows `chain`, may not take that role in the job; None where it may. `stage` None: the request is not
    about one stage. `now`: unix seconds; `revoked`: the newest list of each issuer."""
    admission = law.admission
    if admission.kind == "open" or peer == law.author:
        return None
    if admission.kind == "listed":
        return None if peer in admission.listed else "the job is for listed peers"
    if peer in law.issuers:
        return None
    if not 1 <= len(chain) <= MAX_GRANTS:
        return "the job is for peers with a grant"
    try:
        links = [open_grant(data, verify) for data in chain]
    except RecordError as error:
        return str(error)
    if links[0].issuer not in law.issuers:
        return "its grant is from somebody who may give none"
    for before, link in pairwise(links):
        if link.issuer != before.subject or not before.delegates:
            return "its grant was passed on by somebody who may not"
    if links[-1].subject != peer:
        return "its grant is somebody else's"
    lists = [each for each in revoked if each.issuer == links[0].issuer]
    if any(each.covers(link.subject) for each in lists for link in links):
        return "its grant was revoked"
    refused = (link.refusal(law.job, role, stage, now) for link in links)
    return next((f"of its grant, {reason}" for reason in refused if reason is not None), None)


def _fields(grant: Grant) -> list[Any]:
    roles = sum(1 << ROLES.index(role) for role in set(grant.roles))
    times = (grant.valid_from, grant.valid_until)
    return [
        *(VERSION, bytes.fromhex(grant.job), grant.issuer, grant.subject, roles),
        *(*grant.stages, *times, grant.delegates),
    ]
