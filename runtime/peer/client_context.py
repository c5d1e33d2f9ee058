"""The context of a command that uses the swarm: it lends nothing, offers nothing and leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import shutil
import time
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BLOB_QUOTA_BYTES = 50 << 30  # of a peer, by default
OWN_QUOTA_BYTES = 1 << 50  # of a command, which works for its user alone: the disk is the limit
LOCK = "lock"  # in a command's store
FRESH_SECONDS = 60.0  # for which a store without a lock may be one that is being created


@asynccontextmanager
async def client_context(
    transport: Transport, directory: Directory, access: Access, home: Path
) -> AsyncIterator[Context]:
    """The context of a command. It lends nothing; blobs that it fetches are not offered to others, and are deleted at the end of the
    block."""
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
    """Make torch create its cache folder there; by default it creates one in the system's temporary folder, and leaves it behind."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))


@asynccontextmanager
async def own_store(folder: Path) -> AsyncIterator[BlobStore]:
    """A blob store of this process. It is removed afterwards, with the folders created for it unless others use them.
    Also removes the stores of clients that were killed. Its quota is the whole disk."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with suppress(FileNotFoundError):  # there is none, or another client is just removing it
        for store in folder.iterdir():
            _remove_stale(store)
    own, lock = _new_folder(folder)
    keep_torch_cache(own)
    try:
        yield BlobStore(own, OWN_QUOTA_BYTES)
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        with suppress(OSError):
            for path in created:
                path.rmdir()


def _new_folder(parent: Path) -> tuple[Path, int | None]:
    """A folder for a store, and its lock, to be held while the store is in use. A pid alone does not do: a home may be shared with
    containers and machines, where another client may have the same pid, and ours does not exist."""
    while True:
        own = parent / f"{os.getpid()}-{secrets.token_hex(4)}"
        own.mkdir(parents=True)
        if fcntl is None:
            return own, None
        lock = os.open(own / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (own / LOCK).exists():
            return own, lock
        os.close(lock)  # another client has removed it as stale


def _remove_stale(store: Path) -> None:
    """Remove a store whose client was killed: its lock is free."""
    pid = store.name.partition("-")[0]
    # On Windows, and in stores of the release before, there is no lock.
    if (fcntl is None or pid == store.name) and pid.isdecimal():
        import psutil  # only now: most find nothing

        if psutil.pid_exists(int(pid)):
            return
    with suppress(OSError):  # it is in use
        lock = None
        try:
            if fcntl is not None and (store / LOCK).exists():
                lock = os.open(store / LOCK, os.O_RDWR)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif time.time() - store.stat().st_mtime < FRESH_SECONDS:
                return  # it may be being created
            shutil.rmtree(store, ignore_errors=True)
        finally:
            if lock is not None:
                os.close(lock)
