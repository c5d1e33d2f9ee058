"""The planes, by name. A plane's library is loaded when the plane is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusion.runtime.planes.plane import Plane

TORCH, JAX = "torch", "jax"


def choose(name: str, device: str, threads: int) -> Plane:
    """The plane of that name on `device`, in the plane's own spelling, with `threads` on a CPU. ValueError for an unknown plane, or one
    whose library is not installed."""
    make = _PLANES.get(name)
    if make is None:
        raise ValueError(f"plane: {' or '.join(_PLANES)}, not {name!r:.40}")
    return make(device, threads)


def _torch(device: str, threads: int) -> Plane:
    # Its threads are those of the worker (`fusion.runtime.job.worker`).
    if device.startswith("cuda"):
        from fusion.runtime.planes.cuda.cuda_plane import CudaPlane

        return CudaPlane(device)
    from fusion.runtime.planes.torch_plane import TorchPlane

    return TorchPlane(device)


def _jax(device: str, threads: int) -> Plane:
    from fusion.runtime.planes.jax_plane.library import load

    load(device, threads)  # before our modules import it
    from fusion.runtime.planes.jax_plane.jax_plane import JaxPlane

    return JaxPlane(device, threads)


_PLANES: Mapping[str, Callable[[str, int], Plane]] = {TORCH: _torch, JAX: _jax}
