"""What the keys and invites of a home let its user do in jobs that are not for everybody."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.cli import job_client
from fusion.cli.terminal import options

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.serving.requests.client import GrantsFor
    from fusion.swarm.authority.grants import Grant
    from fusion.swarm.authority.law import JobLaw
    from fusion.swarm.authority.revocation import Revocation
    from fusion.swarm.directory.records import JobId
    from fusion.swarm.identity import Identity

REVOKED_FOLDER = "revoked"  # in a home


def grants_from(context: Context) -> GrantsFor:
    """The grants by which this user may prompt the model of a job."""

    async def show(job: JobId) -> tuple[bytes, ...]:
        from fusion.runtime.belief.reading import manifest_of

        manifest = await manifest_of(context, job, await context.directory.job_records(job))
        if manifest is None:
            return ()
        context.leases.know(manifest.law(job))
        return context.access.chain(job)

    return show


async def law_of(context: Context, wanted: str) -> JobLaw:
    """Of the job `wanted`, whose admission is granted; its revocations are known afterwards. Raises ValueError."""
    known = await job_client.find_known(context, wanted)
    if known.manifest is None:
        raise ValueError(f"nobody gives us the manifest of {known.record.name}; try again in a moment")
    law = known.manifest.law(known.record.job)
    if law.admission.kind != "granted":
        how = "is open to all" if law.admission.kind == "open" else "is for the peers that its manifest lists"
        raise ValueError(f"{law.name} {how}: invites are for jobs of admission granted")
    return law


def issuer_in(home: Path, law: JobLaw) -> Identity:
    """The key of this home that may issue grants in the job. Raises ValueError where it has none."""
    from fusion.runtime.peer.keys import keys_of

    roots = {law.author, *law.admission.roots}
    found = next((key for key in keys_of(options.home_folder(home)) if key.peer_id in roots), None)
    if found is None:
        raise ValueError(
            f"only whoever launched {law.name}, or is one of its roots, gives grants in it: use that home"
        )
    return found


def last_list(home: Path, job: JobId, issuer: Identity) -> Revocation | None:
    """The last revocation list that `issuer` signed for the job with this home; None if there is none."""
    from fusion.swarm.authority.revocation import open_revocation
    from fusion.swarm.errors import RecordError

    with suppress(OSError, RecordError):
        found = open_revocation(_list_path(home, job, issuer).read_bytes())
        if (found.job, found.issuer) == (job, issuer.peer_id):
            return found
    return None


def keep_list(home: Path, job: JobId, issuer: Identity, data: bytes) -> None:
    """Store a revocation list for `last_list`. Raises OSError."""
    path = _list_path(home, job, issuer)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # losing the list in a power cut would restore revoked grants
    scratch.replace(path)


def _list_path(home: Path, job: JobId, issuer: Identity) -> Path:
    return options.home_folder(home) / REVOKED_FOLDER / f"{job}-{issuer.peer_id[-8:]}"


def keep(text: str, folder: Path) -> Grant:
    """Store an invite in a home. Raises ValueError where it is malformed or for another peer."""
    from fusion.runtime.peer.keys import IDENTITY_FILE
    from fusion.swarm.authority import invites
    from fusion.swarm.authority.wallet import INVITES_FOLDER, Wallet
    from fusion.swarm.errors import RecordError
    from fusion.swarm.identity import Identity

    try:
        chain = invites.from_text(text)
        identity = Identity.load_or_create(folder / IDENTITY_FILE)
        Wallet(identity.peer_id, folder / INVITES_FOLDER, (identity,), time.time).add(chain)
        return invites.last_of(chain)
    except RecordError as error:
        raise ValueError(f"invite: {error}") from None
