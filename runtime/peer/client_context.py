"""What a command works with while it uses the swarm: nothing lent, nothing offered, nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.swarm.authority.access import Access
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import Leases
from fusion.swarm.directory.api import Directory
from fusion.swarm.transport import Transport

BLOB_QUOTA_BYTES = 50 << 30  # of a peer, unless its user says otherwise
OWN_QUOTA_BYTES = 1 << 50  # of a command, which works for its user alone: the disk is the limit


@asynccontextmanager
async def client_context(
    transport: Transport, directory: Directory, access: Access, home: Path
) -> AsyncIterator[Context]:
    """Of a command: it lends nothing, and what it fetches is offered to nobody and gone with the block."""
    async with own_store(home / "clients") as store:
        blobs = Blobs(store, transport, directory, BlobConfig(offer=False), access=access)
        try:
            yield Context(
                peer_id=transport.peer_id,
                transport=transport,
                directory=directory,
                blobs=blobs,
                leases=Leases(transport.peer_id, directory, access=access),
                worker=None,
                memory=MemoryBudget(0),
                home=home,
            )
        finally:
            await blobs.aclose()


def keep_torch_cache(folder: Path) -> None:
    """Torch makes a folder for its caches, used or not, which would stay behind in the system's temporary one."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))


@asynccontextmanager
async def own_store(folder: Path) -> AsyncIterator[BlobStore]:
    """A blob store for this process alone, removed afterwards with the folders that were made for it, unless others use
    them by now; the stores of clients that were killed go as well. It may have all that the disk has to spare."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        import psutil  # only now: most find nothing

        if not (left.name.isdecimal() and psutil.pid_exists(int(left.name))):
            shutil.rmtree(left, ignore_errors=True)
    own = folder / str(os.getpid())
    keep_torch_cache(own)
    try:
        yield BlobStore(own, OWN_QUOTA_BYTES)
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):
            for path in made:
                path.rmdir()
