from __future__ import annotations

import pytest
from bench.network_table import (
    HEAD,
    Row,
    bytes_a_step,
    cells,
    in_words,
    markdown,
    plain,
    simulator_error,
    speed_up,
    stage_seconds,
    step_lengths,
    step_seconds,
    time_to_loss,
)


def job(*ended_at: float, sent: int = 10, stages: tuple[float, ...] = (0.1, 0.2)) -> dict[str, object]:
    steps = len(ended_at)
    return {
        "ended_at": list(ended_at),
        "sent_bytes": [sent * (i + 1) for i in range(steps)],
        "stage_seconds": [list(stages)] * steps,
        "validation": [],
        "warm_up": 2,
    }


def row(**changes: object) -> Row:
    given: dict[str, object] = {
        "network": "A", "scheduler": "equal-ops", "codec": "dense", "peers": 6, "codecs": "none", "seconds": 2.0,
        "least_seconds": 1.9, "most_seconds": 2.1, "jobs": 3, "speed_up": 1.0, "sent_bytes": 1e6,
        "model_seconds": 1.9, "simulated_seconds": 1.8, "apart_seconds": 1.7, "apart_speed_up": 1.0, "bound_seconds": 1.5, "bottleneck": "link a -> b",
        "loss": 4.0, "ratio": 17.0, **changes,
    }  # fmt: skip
    return Row(**given)  # type: ignore[arg-type]


def test_steps_before_the_end_of_the_warm_up_do_not_count() -> None:
    one = job(9.0, 10.0, 12.0, 13.0, 16.0)
    assert step_lengths(one) == [2.0, 1.0, 3.0]
    assert step_seconds([one, job(1.0, 2.0, 9.0)]) == 2.5
    assert bytes_a_step([one]) == 10
    busy = [job(1.0, 2.0, 9.0, stages=(0.3, 0.2))] * 2
    assert stage_seconds([one, *busy]) == [0.1, 0.2]  # whatever else takes its time there


def test_the_speed_up_compares_jobs_of_one_round() -> None:
    slow = [job(0.0, 1.0, 5.0), job(0.0, 1.0, 9.0), job(0.0, 1.0, 5.0)]
    fast = [job(0.0, 1.0, 2.0), job(0.0, 1.0, 3.0), job(0.0, 1.0, 3.0)]
    assert speed_up(slow, fast) == 4.0
    assert speed_up(slow, fast[:1]) == 4.0


def test_a_loss_is_reached_between_two_measurements() -> None:
    one = {"validation": [(5, 10.0, 4.0), (10, 20.0, 3.0), (15, 30.0, 2.9)]}
    assert time_to_loss(one, 3.5) == pytest.approx(15.0)
    assert time_to_loss(one, 4.5) == 10.0
    assert time_to_loss(one, 2.9) == pytest.approx(30.0)
    assert time_to_loss(one, 2.0) is None


def test_the_table_has_a_line_for_each_case() -> None:
    rows = [
        row(),
        row(codec="int8", speed_up=3.5, simulated_seconds=2.2, reached_seconds=9.0, reached_speed_up=4.0),
    ]
    assert all(len(cells(each)) == len(HEAD) for each in rows)
    lines = markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {len(HEAD) + 1}
    assert len(plain(rows).splitlines()) == 1 + len(rows)
    assert simulator_error(rows) == (pytest.approx(0.1), pytest.approx(0.1))
    assert rows[0].of_bound == 0.75
    words = "\n".join(in_words(rows))
    assert (
        "median error 10 %" in words and "3.50 times" in words and "17.0 times its stage's compute" in words
    )
