"""The message for a model that does not fit into the peers' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.dag.ir.errors import PlacementError

_LISTED = 8  # peers, in a message


class DoesNotFit(PlacementError):
    """`needed`: the least that the model needs, for people; `offered`: each peer's name and the bytes that it lends."""

    def __init__(self, needed: str, offered: Sequence[tuple[str, int]]) -> None:
        self.needed, self.offered = needed, tuple(sorted(offered, key=lambda peer: (-peer[1], peer[0])))
        listed = ", ".join(f"{name} {size_text(bytes_)}" for name, bytes_ in self.offered[:_LISTED])
        more = len(self.offered) - _LISTED
        super().__init__(
            f"{needed}; what peers offer: {listed}{f' and {more} others at most as much' if more > 0 else ''}"
        )

    def named(self, names: Mapping[str, str]) -> DoesNotFit:
        """The same error with peers under the names that people know them by."""
        return DoesNotFit(self.needed, [(names.get(peer, peer), bytes_) for peer, bytes_ in self.offered])


def size_text(bytes_: float) -> str:
    """A size of memory, e.g. "1.25 GiB" or "3.0 MiB"."""
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 100 << 20 else f"{bytes_ / 2**20:.1f} MiB"
