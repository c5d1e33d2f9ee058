"""Which plane computes: the one place that knows them all by name. A plane's library is loaded when it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusion.runtime.planes.plane import Plane

TORCH = "torch"


def choose(name: str, device: str) -> Plane:
    """The plane of that name on `device`, as the plane spells it. ValueError for one that there is not."""
    make = _PLANES.get(name)
    if make is None:
        raise ValueError(f"plane: {' or '.join(_PLANES)}, not {name!r:.40}")
    return make(device)


def _torch(device: str) -> Plane:
    from fusion.runtime.planes.torch_plane import TorchPlane

    return TorchPlane(device)


_PLANES: Mapping[str, Callable[[str], Plane]] = {TORCH: _torch}
