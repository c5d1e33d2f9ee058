"""The grants that this process can show: accepted invites, and grants that its user's own keys issue to it.

A command that joins the swarm for a moment has a temporary key. Where the user launched the job, the user's key grants it access;
where the user's peer has an invite that delegates, that peer's key does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from cachetools import TTLCache

from fusion.swarm.authority import invites
from fusion.swarm.authority.grants import ROLES, Grant, open_grant, refusal, seal_grant
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.revocation import Revocation
from fusion.swarm.directory.records import MAX_GRANTS, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Signer
from fusion.swarm.transport import PeerId

INVITES_FOLDER = "invites"  # in a home
OWN_SECONDS = 86_400  # for which a grant to ourselves lasts
CLOCK_SECONDS = 600  # by which others' clocks may be behind
REMEMBERED_JOBS = 256
RESCAN_SECONDS = 10.0  # after which the folder is read again
MAX_INVITES = 256  # files that are read
SENT_SECONDS = 0.2  # between two invites that peers sent unasked
MAX_SENT, SENT = 64, "sent-"  # how many of those are kept, and the prefix of their file names

Chain = tuple[bytes, ...]


def _worth(grant: Grant, law: JobLaw) -> tuple[int, int, int]:
    """How many roles, how many stages and until when: compared in this order, since a guest that may delegate could send a grant
    that lasts longer but allows less, and cost the peer its stages."""
    first, last = grant.stages
    return len(set(grant.roles)), min(last, law.stages - 1) - first, grant.valid_until


class Wallet:
    """`peer_id`: of this process. `keys`: its user's, one of which may have launched the job or be the subject of an invite.
    `now`: unix seconds."""

    def __init__(
        self, peer_id: PeerId, folder: Path | None, keys: Iterable[Signer], now: Callable[[], float]
    ) -> None:
        self._peer_id = peer_id
        self._folder = folder
        self._keys = {key.peer_id: key for key in keys}
        self._now = now
        self._sent_at = float("-inf")
        self._found: TTLCache[JobId, Chain] = TTLCache(REMEMBERED_JOBS, RESCAN_SECONDS, timer=now)

    def hold(self, key: Signer) -> None:
        """The user holds that key, too."""
        self._keys[key.peer_id] = key
        self._found.clear()

    def forget(self, job: JobId) -> None:
        """Something was revoked in the job: choose its chain again when it is next needed."""
        self._found.pop(job, None)

    def chain(self, law: JobLaw, revoked: Collection[Revocation] = ()) -> Chain:
        """The chain to show in a job of this law and with these revocations; empty where there is none, or none is needed."""
        if law.admission.kind != "granted" or self._peer_id in {law.author, *law.admission.roots}:
            return ()
        if law.job not in self._found:
            self._found[law.job] = self._find(law, revoked)
        return self._found[law.job]

    def add(
        self,
        chain: Chain,
        *,
        requested: bool = True,
        law_of: Callable[[JobId], JobLaw | None] = lambda job: None,
    ) -> None:
        """Keep an invite that the user accepted (`requested`) or a peer sent. `law_of` gives the law of a job, None where that is not known
        here. Raises RecordError where it has another subject, an issuer who may not issue it, or there are too many; OSError."""
        if not requested:  # anybody may send them at any rate: each costs signatures and a file
            if 0 <= self._now() - self._sent_at < SENT_SECONDS:  # a clock may be set back
                raise RecordError("this peer was sent an invite a moment ago: send it again")
            self._sent_at = self._now()
        grant = invites.last_of(chain)
        if grant.subject != self._peer_id and grant.subject not in self._keys:
            raise RecordError(f"the invite is for {grant.subject}, and this peer is {self._peer_id}")
        if self._now() >= grant.valid_until:
            raise RecordError("the invite has expired")
        law = law_of(grant.job)
        if law is not None and open_grant(chain[0]).issuer not in law.issuers:
            raise RecordError("the invite is from somebody who may give none")
        assert self._folder is not None, "whoever is given invites has a folder for them"
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
        if requested and len(kept) >= MAX_INVITES:
            raise RecordError(f"{self._folder} holds {len(kept)} invites: delete some")
        sent = [path for path in kept if path.name.startswith(SENT)]
        for path in sent[: max(0, len(sent) + 1 - MAX_SENT)] if not requested else ():
            path.unlink(missing_ok=True)  # anybody may send some
        text = invites.to_text(chain)
        name = f"{grant.job}-{grant.subject[-8:]}-{grant.valid_until}"
        if not requested:  # two senders' invites must not share a file name
            name = f"{SENT}{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        (self._folder / name).write_text(text + "\n")
        self._found.pop(grant.job, None)

    def _find(self, law: JobLaw, revoked: Collection[Revocation]) -> Chain:
        for root in (law.author, *law.admission.roots):
            if root in self._keys:
                since = int(self._now())
                given = Grant(
                    job=law.job, issuer=root, subject=self._peer_id, roles=ROLES,
                    valid_from=max(0, since - CLOCK_SECONDS), valid_until=since + OWN_SECONDS,
                )  # fmt: skip
                return (seal_grant(given, self._keys[root]),)
        best: tuple[tuple[int, int, int], Chain, Path | None] = ((0, 0, 0), (), None)
        for path, chain in self._invites():
            grant = invites.last_of(chain)
            if grant.job != law.job or grant.valid_until <= self._now() or _worth(grant, law) <= best[0]:
                continue
            with suppress(RecordError):  # a bad one, which anybody may send, must not hide the others
                own = chain if grant.subject == self._peer_id else self._delegated(chain, grant)
                if own and self._admits_us(law, own, revoked):
                    best = (_worth(grant, law), own, path)
        if best[2] is not None:
            with suppress(OSError):
                os.utime(best[2])  # `add` deletes the least recently used of the sent ones
        return best[1]

    def _admits_us(self, law: JobLaw, chain: Chain, revoked: Collection[Revocation]) -> bool:
        """Whether its issuer may issue it: anybody may send an invite to any job."""
        us, now = self._peer_id, self._now()
        return any(refusal(law, chain, us, role, None, now, revoked=revoked) is None for role in ROLES)

    def _delegated(self, chain: Chain, grant: Grant) -> Chain:
        """The chain with a grant to this process by the key that is its subject; empty where that key is not here or may not delegate."""
        key = self._keys.get(grant.subject)
        until = min(grant.valid_until, int(self._now()) + OWN_SECONDS)
        if key is None or not grant.delegates or len(chain) >= MAX_GRANTS or until <= grant.valid_from:
            return ()
        given = Grant(
            job=grant.job, issuer=key.peer_id, subject=self._peer_id, roles=grant.roles, stages=grant.stages,
            valid_from=grant.valid_from, valid_until=until,
        )  # fmt: skip
        return (*chain, seal_grant(given, key))

    def _invites(self) -> list[tuple[Path, Chain]]:
        """Those in the folder; damaged ones are skipped."""
        found: list[tuple[Path, Chain]] = []
        if self._folder is None or not self._folder.is_dir():
            return found
        for path in sorted(self._folder.iterdir())[:MAX_INVITES]:
            with suppress(OSError, UnicodeDecodeError, RecordError):
                found.append((path, invites.from_text(path.read_text())))
        return found
