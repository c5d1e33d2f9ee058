"""The memory that a peer lends, and its reservations: the one account of it, for all that runs here.

A stage is *held* from before it is claimed until it has ended here. One that the peer stands by for is *kept* while there
is room, and evicted as soon as a stage that runs needs the room: unused ones first, then replicas. Where a stage is both, as a
promoted standby is for a moment, the larger reservation counts. Some of a stage's memory may be *loose*: a cache, which is shed
before anything else. Reservations never exceed what is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import RLock

from fusion.swarm.directory.records import Place


@dataclass(frozen=True)
class _Loose:
    bytes: int  # of the stage's reservation
    shed: Callable[[int], object]


@dataclass(frozen=True)
class _Kept:
    bytes: int
    give_up: Callable[[], object]
    in_use: Callable[[], bool]


class MemoryBudget:
    """Thread-safe: sessions are opened in the worker's thread, everything else happens in the loop's. The callbacks of `keep` run
    in the thread that needs the room, and must not block."""

    def __init__(self, lent_bytes: int) -> None:
        if lent_bytes < 0:
            raise ValueError(f"lent_bytes: at least 0, not {lent_bytes}")
        self.lent_bytes = lent_bytes
        self._lock = RLock()
        self._held: dict[Place, int] = {}
        self._kept: dict[Place, _Kept] = {}
        self._loose: dict[Place, _Loose] = {}

    @property
    def free_bytes(self) -> int:
        """For another stage to run: standbys and loose memory count as free."""
        with self._lock:
            loose = sum(self._loose[place].bytes for place in self._held if place in self._loose)
            return self.lent_bytes - sum(self._held.values()) + loose

    @property
    def spare_bytes(self) -> int:
        """For another standby."""
        return self.lent_bytes - sum(self.by_place.values())

    @property
    def by_place(self) -> Mapping[Place, int]:
        """The bytes that are reserved for each stage."""
        with self._lock:
            kept = {place: max(kept.bytes, self._held.get(place, 0)) for place, kept in self._kept.items()}
            return {**self._held, **kept}

    # --- what runs

    def hold(self, place: Place, bytes_: int) -> None:
        """Reserve memory for a stage that is to run here, or change how much; evicts standbys as far as needed. MemoryError, in one
        line, where it does not fit: then nothing changes."""
        with self._lock:
            self._make_room(place, bytes_, spare_used=False)
            self._held[place] = bytes_
            self._loose.pop(place, None)

    def release(self, place: Place) -> None:
        """The stage does not run here any more. Idempotent."""
        with self._lock:
            self._held.pop(place, None)
            self._loose.pop(place, None)

    def resize(
        self, place: Place, bytes_: int, loose: int = 0, shed: Callable[[int], object] = lambda _: None
    ) -> None:
        """Change the reservation of a stage that serves sessions, held or kept. Evicts only unused standbys and other stages' loose
        memory: MemoryError where that is not enough. Does nothing for a stage that is neither held nor kept. `loose` of the
        bytes may be taken by another stage: `shed` is then called with how many, and must free as many."""
        with self._lock:
            kept = self._kept.get(place)
            if place in self._held:
                self._make_room(place, bytes_, spare_used=True)
                self._held[place] = bytes_
            elif kept is not None:
                self._make_room(place, bytes_, spare_used=True)
                self._kept[place] = replace(kept, bytes=bytes_)
            self._loose.pop(place, None)
            if loose and (place in self._held or kept is not None):
                self._loose[place] = _Loose(loose, shed)

    # --- what is only ready to run

    def keep(
        self,
        place: Place,
        bytes_: int,
        give_up: Callable[[], object],
        in_use: Callable[[], bool] = lambda: False,
        beside: int = 0,
    ) -> bool:
        """Reserve memory for a standby, or change how much, if `beside` bytes stay free; whether that was so. `give_up` is called
        when it is evicted, after other standbys where the stage is `in_use`."""
        with self._lock:
            others = sum(size for other, size in self.by_place.items() if other != place)
            short = others + max(bytes_, self._held.get(place, 0)) + beside - self.lent_bytes
            fits = short <= self._loose_beside(place)
            if fits:
                self._shed_beside(place, short)
                if place not in self._held:
                    self._loose.pop(place, None)
                self._kept[place] = _Kept(bytes_, give_up, in_use)
            return fits

    def keeps(self, place: Place) -> bool:
        """Whether the memory of a standby is still reserved."""
        return place in self._kept

    def forget(self, place: Place) -> None:
        """The stage is not kept any more. Idempotent."""
        with self._lock:
            self._kept.pop(place, None)
            if place not in self._held:
                self._loose.pop(place, None)

    def _loose_beside(self, place: Place) -> int:
        return sum(loose.bytes for other, loose in self._loose.items() if other != place)

    def _shed_beside(self, place: Place, short: int) -> None:
        """Take up to `short` bytes of the loose memory of other stages."""
        for other, loose in list(self._loose.items()):
            taken = min(short, loose.bytes)
            if other == place or taken <= 0:
                continue
            short -= taken
            self._loose[other] = replace(loose, bytes=loose.bytes - taken)
            if taken == loose.bytes:
                del self._loose[other]
            if other in self._held:
                self._held[other] -= taken
            if (kept := self._kept.get(other)) is not None:
                self._kept[other] = replace(kept, bytes=max(0, kept.bytes - taken))
            loose.shed(taken)

    def _make_room(self, place: Place, bytes_: int, *, spare_used: bool) -> None:
        sizes = dict(self.by_place)
        standby_changes = spare_used and place not in self._held
        stays = self._kept[place].bytes if place in self._kept and not standby_changes else 0
        sizes[place] = max(bytes_, stays)
        missing = short = sum(sizes.values()) - self.lent_bytes
        short -= min(max(0, short), self._loose_beside(place))
        others = [other for other in self._kept if other != place and other not in self._held]
        used = {other for other in others if self._kept[other].in_use()}
        candidates = [other for other in others if other not in used]
        candidates += [] if spare_used else [other for other in others if other in used]
        given_up = []
        for other in candidates:
            if short <= 0:
                break
            given_up.append(other)
            short -= sizes[other] - (self._loose[other].bytes if other in self._loose else 0)
        if short > 0:
            raise MemoryError(
                f"stage {place[1]} of job {place[0][:12]} needs {bytes_ >> 20} MiB, and this peer lends "
                f"{self.lent_bytes >> 20} MiB, {sum(self.by_place.values()) >> 20} of them to stages"
            )
        self._shed_beside(place, missing)
        for other in given_up:
            self._loose.pop(other, None)
            self._kept.pop(other).give_up()
