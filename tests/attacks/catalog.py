"""All attacks, by name."""

from __future__ import annotations

from attacks.hold import Attack
from attacks.scripts import (
    directory,
    false_helpers,
    forged_votes,
    hostile_jobs,
    idle_owner,
    outsiders,
    sessions,
    stolen_stages,
    streams,
    terminal,
    third_parties,
)

ATTACKS: dict[str, Attack] = {}
for part in (
    directory,
    streams,
    hostile_jobs,
    forged_votes,
    stolen_stages,
    false_helpers,
    idle_owner,
    sessions,
    outsiders,
    terminal,
    third_parties,
):
    ATTACKS |= part.ATTACKS
