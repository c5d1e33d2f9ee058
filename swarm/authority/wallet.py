"""The grants that this process can show: invites that were accepted, and what its user's own keys may give it.

A command that joins the swarm for a moment has a key of that moment. Where the user launched the job, that key gets a grant
of the user's own; where the user's peer was invited and may pass its invite on, the command gets as much of it.
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
AFRESH_SECONDS = 10.0  # after which the folder is looked into again
MAX_INVITES = 256  # files that are read
SENT_SECONDS = 0.2  # between two invites that nobody here asked for
MAX_SENT, SENT = 64, "sent-"  # of those that nobody here asked for, and how their names begin

Chain = tuple[bytes, ...]


def _worth(grant: Grant, law: JobLaw) -> tuple[int, int, int]:
    """In how many roles, for how many of the stages and until when it lets its peer take part: a guest that may invite others could send
    a longer one for less, and cost the peer its stages."""
    first, last = grant.stages
    return len(set(grant.roles)), min(last, law.stages - 1) - first, grant.valid_until


class Wallet:
    """`peer_id`: whom others take this process for. `keys`: those of its user, which may have launched the job, or be the
    subject of an invite. `now`: unix seconds."""

    def __init__(
        self, peer_id: PeerId, folder: Path | None, keys: Iterable[Signer], now: Callable[[], float]
    ) -> None:
        self._peer_id = peer_id
        self._folder = folder
        self._keys = {key.peer_id: key for key in keys}
        self._now = now
        self._sent_at = float("-inf")
        self._found: TTLCache[JobId, Chain] = TTLCache(REMEMBERED_JOBS, AFRESH_SECONDS, timer=now)

    def hold(self, key: Signer) -> None:
        """The user has that key as well."""
        self._keys[key.peer_id] = key
        self._found.clear()

    def forget(self, job: JobId) -> None:
        """Something was revoked in the job: what is shown there is looked for anew."""
        self._found.pop(job, None)

    def chain(self, law: JobLaw, revoked: Collection[Revocation] = ()) -> Chain:
        """What to show in a job of this law, in which so much was revoked; empty where there is nothing, or nothing is asked."""
        if law.admission.kind != "granted" or self._peer_id in {law.author, *law.admission.roots}:
            return ()
        if law.job not in self._found:
            self._found[law.job] = self._find(law, revoked)
        return self._found[law.job]

    def add(
        self,
        chain: Chain,
        *,
        asked: bool = True,
        law_of: Callable[[JobId], JobLaw | None] = lambda job: None,
    ) -> None:
        """Keep an invite, which the user asked for or somebody sent. `law_of` a job, None where that is not known here. Raises
        RecordError where it is somebody else's, begins with nobody who may give it or there are too many, OSError."""
        if not asked:  # by anybody, as often as they like: it costs signatures, and a file
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
        if asked and len(kept) >= MAX_INVITES:
            raise RecordError(f"{self._folder} holds {len(kept)} invites: delete some")
        sent = [path for path in kept if path.name.startswith(SENT)]
        for path in sent[: max(0, len(sent) + 1 - MAX_SENT)] if not asked else ():
            path.unlink(missing_ok=True)  # anybody may send some
        text = invites.to_text(chain)
        name = f"{grant.job}-{grant.subject[-8:]}-{grant.valid_until}"
        if not asked:  # nor may one take the place of another's
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
            with suppress(RecordError):  # anybody may send one, and it must not keep us from the others
                ours = chain if grant.subject == self._peer_id else self._passed_on(chain, grant)
                if ours and self._lets_us(law, ours, revoked):
                    best = (_worth(grant, law), ours, path)
        if best[2] is not None:
            with suppress(OSError):
                os.utime(best[2])  # of those that were sent the ones go first that nobody uses
        return best[1]

    def _lets_us(self, law: JobLaw, chain: Chain, revoked: Collection[Revocation]) -> bool:
        """Whether it is from somebody who may give it: anybody may send an invite to any job."""
        us, now = self._peer_id, self._now()
        return any(refusal(law, chain, us, role, None, now, revoked=revoked) is None for role in ROLES)

    def _passed_on(self, chain: Chain, grant: Grant) -> Chain:
        """To this process, by the key that it was given to; empty where that cannot be, or not yet."""
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
        """Those that were accepted; what is damaged is passed over."""
        found: list[tuple[Path, Chain]] = []
        if self._folder is None or not self._folder.is_dir():
            return found
        for path in sorted(self._folder.iterdir())[:MAX_INVITES]:
            with suppress(OSError, UnicodeDecodeError, RecordError):
                found.append((path, invites.from_text(path.read_text())))
        return found
