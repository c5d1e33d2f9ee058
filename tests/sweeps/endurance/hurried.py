"""`fusion-peer` with a disk whose day is HURRY times shorter: python tests/sweeps/endurance/hurried.py ARGUMENTS...

Unneeded files expire after 24 s instead of a day; recently used ones are kept for a second.
"""

from __future__ import annotations

from fusion.cli.main import main
from fusion.swarm.blobs import eviction, store

HURRY = 3600.0


def hurry() -> None:
    kept, fresh = eviction.KEPT_SECONDS / HURRY, eviction.FRESH_SECONDS / HURRY
    # By names that must be there.
    assert store.KEPT_SECONDS == eviction.KEPT_SECONDS
    eviction.KEPT_SECONDS = store.KEPT_SECONDS = kept  # type: ignore[misc, attr-defined]
    eviction.FRESH_SECONDS = max(1.0, fresh)  # type: ignore[misc]


if __name__ == "__main__":
    hurry()
    main()
