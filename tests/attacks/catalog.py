"""Every attack there is, by name."""

from __future__ import annotations

from attacks import directory, forged_words, hostile_jobs, sessions, streams, terminal
from attacks.hold import Attack

ATTACKS: dict[str, Attack] = {}
for part in (directory, streams, hostile_jobs, forged_words, sessions, terminal):
    ATTACKS |= part.ATTACKS
