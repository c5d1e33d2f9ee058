"""What is installed beside the client: `pip install fusion-peer` asks the swarm, `fusion-peer[peer]` takes part in it."""

from __future__ import annotations

from fusion.swarm.lean_imports import is_installed

PEER = ("torch", "hivemind")  # without which nothing of the extra works


def has_peer_extra() -> bool:
    """Whether this machine can be a peer. Loads nothing."""
    return all(map(is_installed, PEER))


def need_plane(plane: str) -> None:
    """ValueError, which says how to get it, where the library of the plane is not installed."""
    if plane == "jax" and not is_installed("jax"):
        raise ValueError("--plane jax needs the jax extra: pip install 'fusion-peer[jax]'")


def need_peer_extra(command: str) -> None:
    """ValueError, which says how to get it, where the command could not do its work."""
    if not has_peer_extra():
        raise ValueError(f"fusion-peer {command} needs the peer extra: pip install 'fusion-peer[peer]'")
