"""The keys of a home's user, and what they let a process of that user do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fusion.runtime.job.errors import JobError
from fusion.swarm.authority.access import Access
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.wallet import INVITES_FOLDER, Wallet
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity, Signer
from fusion.swarm.transport import PeerId

IDENTITY_FILE = "identity"  # in a home: the peer's
TRAINER_FILE = "trainer"  # in a home: the key that signs what its user launches


def keys_of(home: Path) -> tuple[Identity, ...]:
    """The existing keys of the user of a home: the peer's, and the one that jobs are launched with."""
    paths = (home / IDENTITY_FILE, home / TRAINER_FILE)
    return tuple(Identity.load(path) for path in paths if path.exists())


def access_of(peer_id: PeerId, directory: Directory, home: Path | None, keys: Sequence[Signer]) -> Access:
    """The access rights of a process with the id `peer_id`, by the invites in `home` and the keys of its user."""
    folder = None if home is None else home / INVITES_FOLDER
    return Access(Wallet(peer_id, folder, keys, directory.now), directory.now, directory.verify)


async def law_here(store: BlobStore, job: JobId) -> JobLaw | None:
    """The law of a job whose manifest is in `store`; None where it is not."""
    from fusion.runtime.job import manifest_wire as manifests  # only now: it knows the codecs

    try:
        data = await asyncio.to_thread(store.path(Digest(job)).read_bytes)
        return (await asyncio.to_thread(manifests.decode, data)).law(job)
    except (SwarmError, JobError, OSError):
        return None
