"""The draft model among the files of a job. Older releases ignore these files, and generate the same tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.directory.records import Digest

GRAPH_FILE = "draft.graph"  # rewritten for decoding, as one stage
WEIGHTS_FILE = "draft.safetensors"
ABOUT_FILE = "draft.json"
MAX_ABOUT_BYTES = 4 << 10


@dataclass(frozen=True)
class DraftFiles:
    graph: Digest
    weights: Digest
    about: Digest


@dataclass(frozen=True)
class AboutDraft:
    """draft.json."""

    max_sequence: int

    def to_json(self) -> bytes:
        return json.dumps(plain(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> AboutDraft:
        """JobError where it is not valid; fields of newer releases are ignored."""
        try:
            about = build(cls, json.loads(data), known_only=True)
        except (ValueError, RecursionError) as error:
            raise JobError(f"{ABOUT_FILE}: {str(error)[:200]}") from None
        if about.max_sequence < 1:
            raise JobError(f"{ABOUT_FILE}: max_sequence must be at least 1")
        return about


def draft_files(manifest: Manifest) -> DraftFiles | None:
    """The files of the job's draft model; None where one is missing."""
    named = dict(manifest.files)
    if manifest.serve is None or not {GRAPH_FILE, WEIGHTS_FILE, ABOUT_FILE} <= named.keys():
        return None
    return DraftFiles(named[GRAPH_FILE], named[WEIGHTS_FILE], named[ABOUT_FILE])
