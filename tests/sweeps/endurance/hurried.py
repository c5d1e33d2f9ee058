"""`fusion-peer` for which a day is HURRY times shorter, as far as its disk goes: python tests/sweeps/endurance/hurried.py ARGUMENTS...

What nobody needs any more leaves the disk after 24 s and not after a day; what was used lately is spared for a second.
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
