"""The properties that every world must have, checked from outside the protocol: on the wire, at the planes, in the directory.

history    the state of a stage after a step is the one that a single process computes; a step is applied once to one
           state, by one owner in one attempt of one lead, with its own samples
commit     the lead commits a step only when every other stage has reported ready for it in that attempt
fence      a stage that has accepted a frame of an owner under a term accepts no frame under a lower one
durable    a restore never goes back behind the newest snapshot that is available and that the lead knows of
terms      no two peers host a stage under one term, if the directory loses no record; a peer that began after the other
           had ended, or had given the stage up, may not have seen its claim
deposed    no live, reachable owner loses its stage to a liar (`worlds.world.World` checks it)
sound      no task of a peer raises an unexpected error
alive      after the last fault every stage gets an owner, and the job ends, each within a bound
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from worlds.arithmetic import ChainPlane
from worlds.process import Process

from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.snapshots.snapshot import Index
from fusion.swarm.directory.records import Digest
from fusion.swarm.transport import Frame, PeerId

States = list[tuple[tuple[int, int], ...]]


class Oracle:
    def __init__(self, history: States, ledger: Ledger, quiet: bool) -> None:
        self.violations: list[str] = []
        self.finished = ""  # the state in which the lead ended the job
        self.committed = 0  # the highest step that any stage has applied
        self.updates = 0
        self._history = history
        self._ledger = ledger
        self._stages = len(history[0])
        self._quiet = quiet
        self._ready: dict[tuple[Any, ...], set[int]] = {}  # (attempt, step) -> stages that reported ready
        self._appliers: dict[tuple[Any, ...], Process] = {}
        self._holders: dict[tuple[int, int], list[Process]] = {}
        # (incarnation, source stage) -> the highest term of a frame that was accepted
        self._highest: dict[tuple[int, int], int] = {}
        # (lead, its term) -> step and digest of the newest snapshot that a stage reported in its join
        self._known: dict[tuple[PeerId, int], tuple[int, Digest | None]] = {}

    def broken(self, text: str) -> None:
        self.violations.append(text)

    def said(self, peer: PeerId, source: int, kind: str, header: Mapping[str, Any]) -> None:
        """Check a frame of `/fusion/stage/3` that the host of stage `source` sends."""
        if kind == "ready":
            self._ready.setdefault((*header["attempt"], header["step"]), set()).add(source)
        elif kind == "commit":
            ready = self._ready.get((*header["attempt"], header["step"]), set())
            missing = set(range(1, self._stages)) - ready
            if missing:
                self.broken(
                    f"commit: {peer} commits step {header['step']} in attempt {header['attempt']}; "
                    f"stages {sorted(missing)} never reported ready"
                )
        elif kind == "finish":
            self.finished = header["state"]
            if self.finished != "done":
                self.broken(f"alive: the job ended {self.finished}: {header['text']}")

    def took(
        self, peer: PeerId, stage: int, own_term: int, incarnation: int, source: int, frame: Frame
    ) -> None:
        """Check a frame that the host of a stage accepted."""
        kind, header = frame.kind, frame.header
        term, key = header["term"], (incarnation, source)
        highest = self._highest.get(key, 0)
        if term < highest:
            self.broken(
                f"fence: {peer} took {kind} of stage {source} under term {term} after one under {highest}"
            )
        self._highest[key] = max(highest, term)
        if kind == "join":
            lead = (peer, own_term)
            checkpoint = (header["newest"]["step"], header["newest"]["digest"])
            self._known[lead] = max(self._known.get(lead, (0, None)), checkpoint, key=lambda known: known[0])

    def applied(
        self, peer: PeerId, plane: ChainPlane, before: tuple[int, int], after: tuple[int, int]
    ) -> None:
        stage = plane.stage.index
        self.updates += 1
        self.committed = max(self.committed, after[0])
        if before[0] + 1 >= len(self._history):
            self.broken(f"history: {peer} applied step {before[0]} of stage {stage}: there is none")
        elif before != self._history[before[0]][stage]:
            self.broken(
                f"history: {peer} applied step {before[0]} of stage {stage} to a state that is not its own"
            )
        elif after != self._history[after[0]][stage]:
            self.broken(
                f"history: step {before[0]} of stage {stage} at {peer} came out otherwise than it should"
            )

    def commits(self, process: Process, stage: int, attempt: tuple[int, int], step: int) -> None:
        """Check that no other peer has applied this step of this stage in this attempt."""
        first = self._appliers.setdefault((stage, attempt, step), process)
        leads = self._holders[0, attempt[0]]
        # Leads that could not know of each other may have used the same term: each has attempts of its own then. So may a lead
        # that starts again and knows nothing, if the first owner has ended as well.
        apart = len({lead.peer_id for lead in leads}) > 1 or first in leads[-1].gone
        if first.peer_id != process.peer_id and not apart:
            peers = f"{first.peer_id} and {process.peer_id}"
            self.broken(f"history: step {step} of stage {stage} in attempt {attempt} applied by {peers}")

    def ended(self, index: Index, shards: Mapping[int, tuple[int, int]]) -> None:
        """Check the job's last snapshot; `shards` has the state of each stage in it."""
        steps = len(self._history) - 1
        if index.step != steps:
            self.broken(f"history: the job ended at step {index.step} of {steps}")
            return
        for stage, state in shards.items():
            if state != self._history[steps][stage]:
                self.broken(f"history: stage {stage} of the last snapshot has not the state of step {steps}")
        if index.ledger != self._ledger:
            self.broken(f"ledger: it ended with {index.ledger}; its samples are {self._ledger}")

    def restores(self, peer: PeerId, term: int, step: int, available: Callable[[Digest], bool]) -> None:
        """Check a lead that sends all stages back to `step`."""
        newest, digest = self._known.get((peer, term), (0, None))
        if step < newest and digest is not None and available(digest):
            self.broken(
                f"durable: {peer} goes back to step {step}, though the snapshot of step {newest} is available"
            )

    def hosts(self, process: Process, stage: int, term: int) -> None:
        """Check that no other peer hosts `stage` under `term`."""
        holders = self._holders.setdefault((stage, term), [])
        others = {other for other in holders if other.peer_id != process.peer_id}
        if process not in holders:
            holders.append(process)
        others = {other for other in others - process.gone if (other, stage) not in process.let_go}
        if self._quiet and others:
            peers = sorted({holder.peer_id for holder in holders})
            self.broken(f"terms: stage {stage} is hosted under term {term} by {' and '.join(peers)}")
