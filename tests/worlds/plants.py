"""Planted bugs: most remove one check of the protocol. The worlds must find each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from worlds.arithmetic import STATE

from fusion.runtime.hosting.stage_claims import StageClaims
from fusion.runtime.training.snapshots import stage_files
from fusion.runtime.training.step import lead, messages
from fusion.runtime.training.streams import fence, partners
from fusion.swarm.authority import belief
from fusion.swarm.claims import claim_cache, owners_seen, votes, voting
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.transport import PeerId


def skip_the_term_check() -> None:
    """A stage accepts every `hello`, whatever its term, and takes frames of old owners as well as of the current one."""

    async def believe(self: Any, peer: PeerId, hello: Any) -> ClaimRecord:
        return ClaimRecord(
            job=hello.job, stage=hello.source, peer=peer, role="owner", term=hello.term, score=0.5, step=0, load=0.0
        )  # fmt: skip

    # A plant that patches a name that does not exist would prove nothing.
    for owner, name, instead in (
        (fence.Fence, "claim_of", believe),
        (fence.Fence, "check", lambda *_: None),
        (partners.Partners, "_check_term", lambda *_: None),
    ):
        assert hasattr(owner, name), name
        setattr(owner, name, instead)


def commit_without_every_ready() -> None:
    """The lead commits when all stages but one are ready."""
    real = lead.lead

    def hasty(state: Any, event: Any, stage: int = 0) -> Any:
        state, actions = real(state, event, stage)
        if (
            isinstance(event, messages.Ready)
            and state.phase == "running"
            and len(state.ready) == state.stages - 1
        ):
            missing = next(s for s in range(state.stages) if s not in state.ready)
            ready = replace(event, fed=state.ready[min(state.ready)].fed)
            state, more = real(state, ready, missing)
            actions = (*actions, *more)
        return state, actions

    for name, module in list(sys.modules.items()):
        if name.startswith("fusion.") and getattr(module, "lead", None) is real:
            module.lead = hasty  # type: ignore[attr-defined]


def promote_from_the_wrong_step() -> None:
    """A peer that loads a snapshot gets the initial weights instead."""
    real = stage_files.StageFiles.load

    async def load(self: Any, checkpoint: Any, owners: Any) -> dict[str, torch.Tensor]:
        state = await real(self, checkpoint, owners)
        if checkpoint.digest is not None and STATE in state:
            return await real(self, type(checkpoint)(), owners)
        return state

    stage_files.StageFiles.load = load  # type: ignore[method-assign]


def believe_any_proof() -> None:
    """Every proof that an owner is gone counts, whatever it contains."""
    assert hasattr(claim_cache.ClaimCache, "proves")
    claim_cache.ClaimCache.proves = lambda *_: True  # type: ignore[method-assign]


def count_forged_votes() -> None:
    """Neighbours' votes count without a check of their signatures."""
    real = votes.open_vote

    def believe(data: bytes, job: Any, stage: int, successor: PeerId, verify: Any) -> Any:
        return real(data, job, stage, successor, lambda *_: True)

    for module in (votes, claim_cache, voting):
        assert module.open_vote is real
        module.open_vote = believe  # type: ignore[attr-defined]


def believe_anybody_of_a_job() -> None:
    """Every record that a job has ended is believed."""
    assert hasattr(belief, "_final")
    belief._final = lambda record, sight: record.state in ("done", "stopped", "failed")  # type: ignore[assignment]


def go_by_any_last_snapshot() -> None:
    """An owner whose stage is done believes its lead, whatever snapshot the lead names."""
    assert hasattr(belief, "_lead_suffices") and hasattr(owners_seen.OwnersSeen, "takes_part")
    belief._lead_suffices = lambda *_: True  # type: ignore[assignment]
    owners_seen.OwnersSeen.takes_part = lambda *_: True  # type: ignore[method-assign]


def wait_for_neighbours_that_are_gone() -> None:
    """Neither of two owners of a stage gives way if their neighbours are gone."""
    assert hasattr(claim_cache.ClaimCache, "unseen_successor")
    claim_cache.ClaimCache.unseen_successor = lambda *_: None  # type: ignore[method-assign]


def fail_as_nobody_expected() -> None:
    """The search for vacant stages raises an unexpected error at a stage that has had an owner."""
    real = StageClaims._vacancy

    def failing(self: Any, place: Any, *more: Any) -> Any:
        if self._context.leases.known_term(*place) > 1:
            raise KeyError(place)
        return real(self, place, *more)

    StageClaims._vacancy = failing  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "term": skip_the_term_check,
    "ready": commit_without_every_ready,
    "promote": promote_from_the_wrong_step,
    "proof": believe_any_proof,
    "votes": count_forged_votes,
    "belief": believe_anybody_of_a_job,
    "snapshot": go_by_any_last_snapshot,
    "witness": wait_for_neighbours_that_are_gone,
    "mistake": fail_as_nobody_expected,
}
