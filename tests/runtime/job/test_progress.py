from __future__ import annotations

import pytest

from fusion.runtime.job.progress import (
    MAX_FAILURES,
    MAX_LOADING,
    MAX_REASON,
    StageFailure,
    StageLoading,
    stages_failed,
    stages_loading,
)
from fusion.swarm.directory.records import JobId

FETCHING = StageLoading(
    job=JobId("ab" * 32), stage=2, phase="fetching", bytes=412_000_000, of_bytes=1_017_000_000, seconds=31.4,
    trouble="quiet-otter did not answer",
)  # fmt: skip


def test_what_a_peer_says_of_its_loading_arrives() -> None:
    assert stages_loading({"loading": [FETCHING.to_list()]}) == [FETCHING]
    assert stages_loading({"loading": [FETCHING.to_list()]})[0].seconds == 31.4
    assert stages_loading({}) == []  # an older peer


@pytest.mark.parametrize(
    "value",
    [
        "x",
        {"a": 1},
        [7],
        [[]],
        [["job", -1, "fetching", 0, 0, 0.0, ""]],
        [["job", 0, "dreaming", 0, 0, 0.0, ""]],
        [["job", 0, "fetching", 5, 4, 0.0, ""]],
        [["job", 0, "fetching", 0, 4, "long", ""]],
        [["job", 0, "fetching", 0, 4, -1.0, ""]],
    ],
)
def test_nonsense_is_left_out(value: object) -> None:
    assert stages_loading({"loading": value}) == []


def test_what_is_shown_is_one_clean_line_and_not_too_many() -> None:
    loud = [*FETCHING.to_list()[:6], "first\nsecond\x1b[2J" + "x" * 1000]
    (found,) = stages_loading({"loading": [loud]})
    assert "\n" not in found.line() and "\x1b" not in found.line() and len(found.line()) < 400
    assert len(stages_loading({"loading": [loud] * 1000})) == MAX_LOADING


def test_a_line_says_how_far_and_since_when() -> None:
    assert FETCHING.line() == "412 of 1,017 MB fetched in 31 s (quiet-otter did not answer)"
    loading = StageLoading(job=FETCHING.job, stage=0, phase="loading", bytes=9, of_bytes=9, seconds=12.2)
    assert loading.line() == "loading for 12 s"
    unknown = StageLoading(job=FETCHING.job, stage=0, phase="fetching", bytes=0, of_bytes=0, seconds=3)
    assert unknown.line() == "looking for its weights for 3 s"


def test_what_a_peer_says_of_stages_that_did_not_work_out_arrives_in_clean_lines_and_not_too_many() -> None:
    failure = StageFailure(job=FETCHING.job, stage=3, reason="no room on the disk")
    assert stages_failed({"failed": [failure.to_list()]}) == [failure] and stages_failed({}) == []
    (loud,) = stages_failed({"failed": [[FETCHING.job, 0, "first\nsecond\x1b[2J" + "x" * 1000]]})
    assert "\n" not in loud.reason and "\x1b" not in loud.reason and len(loud.reason) <= 2 * MAX_REASON
    assert len(stages_failed({"failed": [failure.to_list()] * 1000})) == MAX_FAILURES
    for nonsense in ("x", {"a": 1}, [7], [[]], [["job", -1, "why"]], [["job", 0, 5]]):
        assert stages_failed({"failed": nonsense}) == []
