"""Every attack there is, by name."""

from __future__ import annotations

from attacks import directory, forged_words, hostile_jobs, streams
from attacks.hold import Attack

ATTACKS: dict[str, Attack] = {
    **directory.ATTACKS,
    **streams.ATTACKS,
    **hostile_jobs.ATTACKS,
    **forged_words.ATTACKS,
}
