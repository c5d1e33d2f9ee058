"""What a process may by its invites and its user's keys, and what is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.authority import invites
from fusion.swarm.authority.access import Access, chain_of
from fusion.swarm.authority.grants import ROLES, Grant, seal_grant
from fusion.swarm.authority.law import Admission, JobLaw
from fusion.swarm.authority.revocation import MAX_REVOKED, mark, open_revocation, seal_revocation
from fusion.swarm.authority.wallet import MAX_SENT, RESCAN_SECONDS, SENT_SECONDS, Wallet
from fusion.swarm.directory.records import MAX_PROOF_BYTES, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity

AUTHOR, ROOT, ALICE, COMMAND, MALLORY = (Identity.generate() for _ in range(5))
JOB = JobId("1" * 64)
LAW = JobLaw(
    job=JOB, author=AUTHOR.peer_id, stages=4, admission=Admission(kind="granted", roots=(ROOT.peer_id,))
)
NOW = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def granted(issuer: Identity, subject: Identity, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "job": JOB,
        "roles": ROLES,
        "valid_from": 999_000,
        "valid_until": 1_001_000,
        "delegates": True,
    }
    made = Grant(issuer=issuer.peer_id, subject=subject.peer_id, **fields | changes)
    return seal_grant(made, issuer)


def wallet(folder: Path, who: Identity, *keys: Identity, clock: Clock | None = None) -> Wallet:
    return Wallet(who.peer_id, folder, keys, clock or Clock())


def access(clock: Clock | None = None) -> Access:
    made = Access(now=clock or Clock())
    made.know(LAW)
    return made


def may(made: Access, who: Identity, chain: tuple[bytes, ...]) -> bool:
    return made.refusal(JOB, who.peer_id, "ask", None, chain) is None


def test_an_invite_is_a_line_that_its_subject_alone_can_accept(tmp_path: Path) -> None:
    chain = (granted(AUTHOR, ALICE),)
    text = invites.to_text(chain)
    assert len(text.splitlines()) == 1 and invites.from_text(f" {text}\n") == chain
    alice = wallet(tmp_path / "alice", ALICE, ALICE)
    assert alice.chain(LAW) == ()
    alice.add(chain)
    assert alice.chain(LAW) == chain and may(access(), ALICE, alice.chain(LAW))
    with pytest.raises(RecordError, match="is for"):
        wallet(tmp_path / "mallory", MALLORY, MALLORY).add(chain)
    with pytest.raises(RecordError, match="expired"):
        alice.add((granted(AUTHOR, ALICE, valid_until=999_500),))


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: invites.PREFIX + data.hex()))
def test_what_is_no_invite_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(RecordError, match=r"invite|grant"):
        invites.from_text(text)


def test_a_command_shows_what_its_users_keys_can_give_it(tmp_path: Path) -> None:
    made = access()
    for root in (AUTHOR, ROOT):  # whoever launched the job, or gives grants in it
        assert may(made, COMMAND, wallet(tmp_path / "none", COMMAND, root).chain(LAW))
    assert wallet(tmp_path / "none", AUTHOR, AUTHOR).chain(LAW) == (), "it needs none"
    folder = tmp_path / "home"
    wallet(folder, ALICE, ALICE).add((granted(AUTHOR, ALICE, roles=("ask",)),))
    passed_on = wallet(folder, COMMAND, ALICE).chain(LAW)
    assert len(passed_on) == 2 and may(made, COMMAND, passed_on)
    assert made.refusal(JOB, COMMAND.peer_id, "read", None, passed_on) is not None, (
        "no more than the peer may"
    )
    assert not may(made, MALLORY, passed_on)
    final = tmp_path / "final"
    wallet(final, ALICE, ALICE).add((granted(AUTHOR, ALICE, delegates=False),))
    assert wallet(final, COMMAND, ALICE).chain(LAW) == ()


def test_what_strangers_send_is_bounded_and_pushes_out_nothing_that_the_user_accepted(tmp_path: Path) -> None:
    clock = Clock()
    alice = wallet(tmp_path, ALICE, ALICE, clock=clock)
    alice.add((granted(AUTHOR, ALICE),))
    for i in range(MAX_SENT + 10):
        clock.now += 2 * SENT_SECONDS
        sent = Grant(
            job=JobId(f"{i:064x}"), issuer=MALLORY.peer_id, subject=ALICE.peer_id, roles=ROLES, valid_from=0,
            valid_until=2_000_000,
        )  # fmt: skip
        alice.add((seal_grant(sent, MALLORY),), requested=False)
        with pytest.raises(RecordError, match="a moment ago"):
            alice.add((seal_grant(sent, MALLORY),), requested=False)
    assert len(list(tmp_path.iterdir())) == MAX_SENT + 1 and alice.chain(LAW)


@pytest.mark.parametrize("until", [1_001_000, 1_500_000])
def test_an_invite_from_whoever_may_give_none_takes_no_sound_ones_place(tmp_path: Path, until: int) -> None:
    """One frame of a stranger used to cost a peer its part in a job."""
    clock = Clock()
    alice, chain = wallet(tmp_path, ALICE, ALICE, clock=clock), (granted(AUTHOR, ALICE),)
    alice.add(chain, requested=False)
    clock.now += 2 * SENT_SECONDS
    alice.add((granted(MALLORY, ALICE, valid_until=until),), requested=False)
    clock.now += 2 * RESCAN_SECONDS
    assert alice.chain(LAW) == chain


def test_an_invite_that_is_in_use_is_not_pushed_out_by_what_strangers_send(tmp_path: Path) -> None:
    clock = Clock()
    alice, chain = wallet(tmp_path, ALICE, ALICE, clock=clock), (granted(AUTHOR, ALICE),)
    alice.add(chain, requested=False)
    for i in range(2 * MAX_SENT):
        clock.now += 1.1 * SENT_SECONDS
        sent = granted(MALLORY, ALICE, job=JobId(f"{i:064x}"))
        alice.add((sent,), requested=False)
        assert alice.chain(LAW) == chain  # as at every heartbeat


def test_an_invite_that_nobody_can_pass_on_yet_keeps_no_other_from_being_shown(tmp_path: Path) -> None:
    """It raised wherever the peer's grants were asked for, so that every renewal of its claims failed."""
    clock = Clock()
    alice, chain = wallet(tmp_path, ALICE, ALICE, COMMAND, clock=clock), (granted(AUTHOR, ALICE),)
    alice.add(chain)
    day = 86_400
    for since in (int(NOW) + day, int(NOW) + 2 * day):
        clock.now += 2 * SENT_SECONDS
        later = granted(MALLORY, COMMAND, valid_from=since, valid_until=int(NOW) + 30 * day)
        alice.add((later,), requested=False)
        assert alice.chain(LAW) == chain
    command = wallet(tmp_path, Identity.generate(), ALICE, COMMAND, clock=clock)
    assert command.chain(LAW)[:1] == chain


def test_an_invite_that_is_sent_by_whoever_may_give_none_is_not_kept_where_the_job_is_known(
    tmp_path: Path,
) -> None:
    clock = Clock()
    alice = wallet(tmp_path, ALICE, ALICE, clock=clock)
    laws = {JOB: LAW}
    with pytest.raises(RecordError, match="may give none"):
        alice.add((granted(MALLORY, ALICE),), requested=False, law_of=laws.get)
    assert list(tmp_path.iterdir()) == []
    for sound in (granted(ROOT, ALICE), granted(MALLORY, ALICE, job=JobId("2" * 64))):
        clock.now += 2 * SENT_SECONDS
        alice.add((sound,), requested=False, law_of=laws.get)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "less",
    [{"roles": ("ask",)}, {"stages": (2, 2)}, {"roles": ("ask", "stand-by"), "stages": (0, 1)}],
    ids=str,
)
def test_a_longer_invite_for_less_costs_nobody_its_stages(tmp_path: Path, less: dict[str, Any]) -> None:
    """A guest that may invite others can send one to whoever holds stages."""
    own = (granted(AUTHOR, ALICE, valid_until=1_000_500),)
    sent = (granted(AUTHOR, MALLORY), granted(MALLORY, ALICE, valid_until=1_000_900, delegates=False, **less))
    alice = wallet(tmp_path, ALICE, ALICE)
    alice.add(own)
    alice.add(sent, requested=False, law_of=lambda job: LAW)
    assert alice.chain(LAW) == own


def test_an_invite_by_a_guest_that_was_revoked_keeps_no_sound_one_from_being_shown(tmp_path: Path) -> None:
    own = (granted(AUTHOR, ALICE, valid_until=1_000_500),)
    sent = (granted(AUTHOR, MALLORY), granted(MALLORY, ALICE, valid_until=1_000_900, delegates=False))
    alice = wallet(tmp_path, ALICE, ALICE)
    alice.add(own)
    alice.add(sent, requested=False, law_of=lambda job: LAW)
    made = Access(alice, now=Clock())
    made.know(LAW)
    assert made.chain(JOB) == sent
    assert made.revoke(JOB, seal_revocation(JOB, {mark(MALLORY.peer_id)}, NOW, AUTHOR))
    assert made.chain(JOB) == own and may(made, ALICE, made.chain(JOB))


def test_a_clock_that_is_set_back_keeps_no_invite_out(tmp_path: Path) -> None:
    clock = Clock()
    clock.now += 500.0
    alice, chain = wallet(tmp_path, ALICE, ALICE, clock=clock), (granted(AUTHOR, ALICE),)
    alice.add((granted(MALLORY, ALICE),), requested=False)
    clock.now -= 400.0
    alice.add(chain, requested=False)
    assert alice.chain(LAW) == chain


def test_a_grant_ends_when_it_says_so(tmp_path: Path) -> None:
    clock = Clock()
    made, chain = access(clock), (granted(AUTHOR, ALICE),)
    assert may(made, ALICE, chain)
    clock.now = 1_001_000.0
    assert not may(made, ALICE, chain)


def test_the_newest_list_of_each_who_gives_grants_takes_them_back() -> None:
    made, chain = access(), (granted(AUTHOR, ALICE),)
    through = (granted(AUTHOR, ALICE), granted(ALICE, COMMAND))
    by_root = (granted(ROOT, ALICE),)
    first = seal_revocation(JOB, [mark(ALICE.peer_id)], NOW, AUTHOR)
    assert made.revoke(JOB, first) and not made.revoke(JOB, first), "it is known"
    assert not may(made, ALICE, chain) and not may(made, COMMAND, through), "and what was passed on"
    assert may(made, ALICE, by_root), "another's grant is another's to take back"
    assert made.revocations(JOB) == (first,)
    older = seal_revocation(JOB, [], NOW - 1, AUTHOR)
    assert not made.revoke(JOB, older) and not may(made, ALICE, chain)
    newer = seal_revocation(JOB, [mark(MALLORY.peer_id)], NOW + 1, AUTHOR)
    assert made.revoke(JOB, newer) and may(made, ALICE, chain), "the list is whole"
    for bad in (seal_revocation(JOB, [mark(ALICE.peer_id)], NOW + 9, MALLORY), first[:-1], b"", b"\x93"):
        assert not made.revoke(JOB, bad)
    assert may(made, ALICE, chain)


def test_a_list_has_room_in_a_record_and_a_limit() -> None:
    marks = [bytes([i]) * 12 for i in range(MAX_REVOKED)]
    data = seal_revocation(JOB, marks, NOW, AUTHOR)
    assert len(data) <= MAX_PROOF_BYTES and open_revocation(data).marks == set(marks)
    with pytest.raises(RecordError, match="at most"):
        seal_revocation(JOB, [*marks, b"x" * 12], NOW, AUTHOR)
    forged = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(RecordError, match="signature"):
        open_revocation(forged)


def test_of_a_job_that_nobody_here_knows_nothing_is_refused_but_to_readers() -> None:
    import asyncio

    made = Access(now=Clock())
    assert made.refusal(JOB, MALLORY.peer_id, "own", 0) is None
    assert asyncio.run(made.strict_refusal(JOB, MALLORY.peer_id, "read")) is not None

    async def here(job: JobId) -> JobLaw | None:
        return LAW

    made.look_up = here
    assert asyncio.run(made.strict_refusal(JOB, ALICE.peer_id, "read", (granted(AUTHOR, ALICE),))) is None
    assert asyncio.run(made.strict_refusal(JOB, MALLORY.peer_id, "read")) is not None


@pytest.mark.parametrize("value", [1, "x", [1], [b"x" * 300], [b"", b"", b""]])
def test_grants_of_a_frame_are_a_short_list_of_short_bytes(value: object) -> None:
    with pytest.raises(RecordError):
        chain_of(value)
    assert chain_of(None) == () and chain_of([b"x"]) == (b"x",)
