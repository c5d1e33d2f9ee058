"""The memory that a peer lends, and what it is set aside for: the one account of it, for all that runs here.

A stage is *held* from before it is claimed until it has ended here. One that the peer stands by for is *kept* while there
is room, and given up as soon as something that runs needs the room: what nobody uses first, then replicas. Where a stage is
both, as one that stood by and was promoted is for a moment, the larger counts. What is set aside never exceeds what is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import RLock

from fusion.swarm.directory.records import Place


@dataclass(frozen=True)
class _Kept:
    bytes: int
    give_up: Callable[[], object]
    in_use: Callable[[], bool]


class MemoryBudget:
    """Thread-safe: sessions are opened in the worker's thread, everything else happens in the loop's. What `keep` is
    told to call runs in whichever thread needs the room, and must not wait for anything."""

    def __init__(self, lent_bytes: int) -> None:
        if lent_bytes < 0:
            raise ValueError(f"lent_bytes: at least 0, not {lent_bytes}")
        self.lent_bytes = lent_bytes
        self._lock = RLock()
        self._held: dict[Place, int] = {}
        self._kept: dict[Place, _Kept] = {}

    @property
    def free_bytes(self) -> int:
        """For another stage to run: standbys give way."""
        with self._lock:
            return self.lent_bytes - sum(self._held.values())

    @property
    def spare_bytes(self) -> int:
        """For another standby."""
        return self.lent_bytes - sum(self.by_place.values())

    @property
    def by_place(self) -> Mapping[Place, int]:
        """The bytes that are set aside for each stage."""
        with self._lock:
            kept = {place: max(kept.bytes, self._held.get(place, 0)) for place, kept in self._kept.items()}
            return {**self._held, **kept}

    # --- what runs

    def hold(self, place: Place, bytes_: int) -> None:
        """Set memory aside for a stage that is to run here, or change how much; standbys are given up for it as far as
        it takes. MemoryError, in one line, where it does not fit: then nothing changes."""
        with self._lock:
            self._make_room(place, bytes_, spare_used=False)
            self._held[place] = bytes_

    def release(self, place: Place) -> None:
        """The stage does not run here, or no more. Harmless where it was not held."""
        with self._lock:
            self._held.pop(place, None)

    def resize(self, place: Place, bytes_: int) -> None:
        """A stage that takes sessions, held or kept, needs so much now. Only standbys that nobody uses are given up for
        it: MemoryError where that is not enough. Of a stage that is neither, nothing is known or changed."""
        with self._lock:
            kept = self._kept.get(place)
            if place in self._held:
                self._make_room(place, bytes_, spare_used=True)
                self._held[place] = bytes_
            elif kept is not None:
                self._make_room(place, bytes_, spare_used=True)
                self._kept[place] = _Kept(bytes_, kept.give_up, kept.in_use)

    # --- what is only ready to run

    def keep(
        self,
        place: Place,
        bytes_: int,
        give_up: Callable[[], object],
        in_use: Callable[[], bool] = lambda: False,
        beside: int = 0,
    ) -> bool:
        """Set memory aside for a standby, or change how much, if there is room and `beside` bytes more; whether there
        was. `give_up` is called when the room is needed, later where the stage is `in_use`."""
        with self._lock:
            others = sum(size for other, size in self.by_place.items() if other != place)
            fits = others + max(bytes_, self._held.get(place, 0)) + beside <= self.lent_bytes
            if fits:
                self._kept[place] = _Kept(bytes_, give_up, in_use)
            return fits

    def keeps(self, place: Place) -> bool:
        """Whether the memory of a standby is still set aside."""
        return place in self._kept

    def forget(self, place: Place) -> None:
        """The stage is not kept ready any more. Harmless where it was not kept."""
        with self._lock:
            self._kept.pop(place, None)

    def _make_room(self, place: Place, bytes_: int, *, spare_used: bool) -> None:
        sizes = dict(self.by_place)
        standby_changes = spare_used and place not in self._held
        stays = self._kept[place].bytes if place in self._kept and not standby_changes else 0
        sizes[place] = max(bytes_, stays)
        short = sum(sizes.values()) - self.lent_bytes
        others = [other for other in self._kept if other != place and other not in self._held]
        used = {other for other in others if self._kept[other].in_use()}
        candidates = [other for other in others if other not in used]
        candidates += [] if spare_used else [other for other in others if other in used]
        given_up = []
        for other in candidates:
            if short <= 0:
                break
            given_up.append(other)
            short -= sizes[other]
        if short > 0:
            raise MemoryError(
                f"stage {place[1]} of job {place[0][:12]} needs {bytes_ >> 20} MiB, and this peer lends "
                f"{self.lent_bytes >> 20} MiB, {sum(self.by_place.values()) >> 20} of them to stages"
            )
        for other in given_up:
            self._kept.pop(other).give_up()
