"""The configuration of fetching, serving and announcing blobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlobConfig:
    holders: int = 4  # that one blob is fetched from at once
    attempts: int = 6  # rounds without a single new chunk before a fetch gives up
    retry_seconds: float = 1.0  # between rounds
    # A holder that sends no chunk for so long is dropped, and so is a reader that takes none.
    chunk_seconds: float = 30.0
    announce_seconds: float = 20.0
    announced: int = 1024  # blobs at most
    offer: bool = True  # False: nothing is announced
    uploads: int = 8  # chunks read from disk at once, for others
    upload_bytes_per_second: float | None = None  # to all others together; None: as much as the network takes

    def __post_init__(self) -> None:
        for name in ("holders", "attempts", "chunk_seconds", "announce_seconds", "announced", "uploads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.upload_bytes_per_second is not None and self.upload_bytes_per_second <= 0:
            raise ValueError(f"upload_bytes_per_second must be positive, not {self.upload_bytes_per_second}")
        if self.retry_seconds < 0:
            raise ValueError(f"retry_seconds must be at least 0, not {self.retry_seconds}")
