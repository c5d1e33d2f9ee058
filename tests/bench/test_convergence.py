from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import convergence
from bench.convergence_run import Line
from support.captured_once import capture_once

from fusion.compression.spec import parse
from fusion.runtime.capture import capture
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.job.spec import GPTConfig

TEXT = bytes(range(32, 127)) * 40


def small() -> convergence.Study:
    plan = convergence.study(steps=3)
    train = replace(plan.train, microbatch_size=2, sequence=16, evaluate_every=3, evaluate_batches=2)
    return convergence.Study(
        model=GPTConfig(blocks=4, width=16, heads=2, sequence=16, tied=False), train=train
    )


@pytest.fixture(scope="module", autouse=True)
def _the_model_is_captured_once() -> Iterator[None]:
    """The capture is the same for every seed."""
    with pytest.MonkeyPatch.context() as patch:
        capture_once(patch, capture)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in ("train", "held_out"):
        (folder / name).write_bytes(TEXT)
    return folder


def trained(folder: Path, compression: CompressionConfig) -> dict[str, Any]:
    plan = small()
    return asyncio.run(convergence.train(plan, convergence.graph_of(plan), 1, compression, folder))


@pytest.fixture(scope="module")
def dense(folder: Path) -> dict[str, Any]:
    return trained(folder, CompressionConfig())


@pytest.mark.slow
def test_four_stages_learn_what_one_learns(folder: Path, dense: dict[str, Any]) -> None:
    plan = small()
    graph = convergence.graph_of(plan)
    config = replace(plan.train, seed=1)
    read = convergence._model(plan.model, 1).read
    whole = Line(graph, (), read, config, folder / "train", folder / "held_out")

    async def alone() -> list[float]:
        return [await whole.step(step) for step in range(config.steps)]

    assert dense["losses"] == pytest.approx(asyncio.run(alone()), rel=1e-5)
    assert whole.sent_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in convergence.codecs(512) if name != "dense"])
def test_every_codec_of_the_study_trains(folder: Path, dense: dict[str, Any], name: str) -> None:
    found = trained(folder, convergence.codecs(512)[name])
    assert [step for step, _ in found["validation"]] == [0, 3]
    assert found["sent_bytes"] < dense["sent_bytes"]
    assert found["losses"][-1] == pytest.approx(dense["losses"][-1], rel=0.2)


@pytest.mark.parametrize("ratio", convergence.RATIOS)
def test_a_ratio_is_one_of_bytes(ratio: int) -> None:
    elements = 4 * 128 * 128
    spec = convergence.sparse(elements, ratio)
    assert parse(str(spec)) == spec
    reached = 4 * elements / spec.payload_bytes(elements, 4)
    assert ratio <= reached < (1.05 * ratio if ratio > 2 else 4.0)


def test_the_table_compares_runs_of_the_same_seeds() -> None:
    def run(loss: float, sent: float) -> dict[str, Any]:
        return {"validation": [(0, 5.0), (3, loss)], "sent_bytes": sent, "codecs": [["e", "int8", "none"]]}

    runs = {"dense": {"0": run(2.0, 8.0), "1": run(3.0, 8.0)}, "int8": {"1": run(3.3, 2.0)}}
    rows = convergence.table(runs, ["dense", "int8", "int4"])
    assert [row[0] for row in rows[1:]] == ["dense", "int8"]
    assert rows[2][1:] == ("1", "3.3000", "3.300", "+10.00 %", "0.2500", "int8, none")
