"""The results of `make bench-network` on disk, and the page that shows them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.network_cases import Bench, Case, Predicted, placed, predicted
from bench.network_machine import Machine, Used, carrying
from bench.network_table import (
    Row,
    bytes_a_step,
    in_words,
    markdown,
    plain,
    speed_up,
    stage_seconds,
    step_seconds,
    time_to_loss,
)

from fusion.compression.adaptive import CodecSpeed


class Results:
    """The results, saved after every job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = {
            "bench": {}, "jobs": {}, "alone": {}, "curves": {}, "failed": [], "speeds": {}, "machine": {},
        }  # fmt: skip
        if path.exists():
            self.data = json.loads(path.read_text())

    def open(self, bench: Bench) -> None:
        """Raises ValueError if the file's results of this network are those of another model."""
        about = json.loads(json.dumps(bench.to_json()))
        if self.data["bench"].setdefault(bench.name, about) != about:
            raise ValueError(
                f"{self._path}: network {bench.name} is of another model or schedule; move it away to begin anew"
            )

    def jobs(self, kind: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.data[kind].setdefault(name, [])
        return found

    def failures(self, kind: str, case: Case) -> int:
        return sum(failed[:2] == [kind, case.name] for failed in self.data["failed"])

    def save(self) -> None:
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self.data) + "\n")
        scratch.replace(self._path)


def alone(bench: Bench, case: Case) -> str:
    """The key of jobs without limits: several cases may share a placement."""
    placement = placed(bench, case).placement
    return f"{case.network}: {' '.join(placement.owners)} at {' '.join(map(str, placement.cuts))}"


def expected(bench: Bench, results: Results, case: Case) -> Predicted:
    """The prediction of a case from the measurements so far of the machine, its codecs, the stages and the baseline."""
    machine = Machine(**results.data["machine"][bench.name])
    baseline = results.data["jobs"].get(bench.baseline.name)
    if baseline:
        machine = carrying(machine, _used(_predicted(bench, results, bench.baseline), baseline))
    return _predicted(bench, results, case, machine)


def _predicted(bench: Bench, results: Results, case: Case, machine: Machine | None = None) -> Predicted:
    """The prediction of a case; `machine` None: every peer has a machine of its own."""
    speeds = {family: CodecSpeed(**speed) for family, speed in results.data["speeds"].items()}
    calibration = results.data["alone"].get(alone(bench, case))
    return predicted(bench, case, stage_seconds(calibration) if calibration else None, speeds, machine)


def rows(bench: Bench, results: Results, cases: Sequence[Case]) -> list[Row]:
    """The results of the cases that were measured together with their network's baseline."""
    data, found = results.data, []
    cores = os.cpu_count() or 1
    for case in cases:
        base = bench.baseline
        jobs, baseline = data["jobs"].get(case.name), data["jobs"].get(base.name)
        calibration = data["alone"].get(alone(bench, case))
        if not jobs or not baseline or not calibration:
            continue
        dense, apart, here = (
            _predicted(bench, results, base),
            _predicted(bench, results, case),
            expected(bench, results, case),
        )
        cores_seconds = median(job["cpu_seconds"] for job in jobs) / cores
        bound, what = max(
            (here.bound_seconds, here.bottleneck),
            (cores_seconds, f"the {cores} cores of this machine"),
        )
        steps = min(len(job["losses"]) for name, all_ in data["jobs"].items() for job in all_
                    if name.startswith(f"{case.network} /"))  # fmt: skip
        target = _target(data, base)
        own = data["curves"].get(case.name)
        reached = time_to_loss(own[0], target) if own and target is not None else None
        medians = [step_seconds([job]) for job in jobs]
        arranged = placed(bench, case)
        found.append(
            Row(
                network=case.network,
                scheduler=case.scheduler,
                codec=case.codec,
                peers=len(arranged.placement.owners),
                codecs=_codecs(arranged.codecs),
                seconds=step_seconds(jobs),
                least_seconds=min(medians),
                most_seconds=max(medians),
                jobs=len(jobs),
                speed_up=speed_up(baseline, jobs),
                sent_bytes=bytes_a_step(jobs),
                model_seconds=here.model_seconds,
                simulated_seconds=here.simulated_seconds,
                apart_seconds=apart.simulated_seconds,
                apart_speed_up=dense.simulated_seconds / apart.simulated_seconds,
                bound_seconds=bound,
                bottleneck=what,
                loss=median(job["losses"][steps - 1] for job in jobs),
                ratio=dense.slowest_ratio,
                reached_seconds=reached,
                reached_speed_up=data["curves"][base.name][0]["validation"][-1][1] / reached
                if reached
                else None,
            )
        )
    return found


def _used(expected: Predicted, jobs: Sequence[dict[str, Any]]) -> Used:
    return Used(
        cpu_seconds=median(job["cpu_seconds"] for job in jobs),
        step_seconds=step_seconds(jobs),
        computing_seconds=expected.computing_seconds,
        messages=expected.messages,
        bytes=bytes_a_step(jobs),
        packets=expected.packets,
    )


def _target(data: dict[str, Any], base: Case) -> float | None:
    """The baseline's last validation loss."""
    found = data["curves"].get(base.name)
    return float(found[0]["validation"][-1][2]) if found else None


def _codecs(codecs: Sequence[tuple[str, str, str]]) -> str:
    """The names of the codecs in use; one for both directions is named once."""
    names = {name for _, *ways in codecs for name in ways}
    return ", ".join(sorted(names)) or "none"


def report(results: Results, chosen: Sequence[tuple[Bench, Sequence[Case]]], folder: Path) -> None:
    """Print the table, and write it and the curves into the folder."""
    found = [row for bench, cases in chosen for row in rows(bench, results, cases)]
    if not found:
        print("nothing to report yet")
        return
    print(plain(found))
    words = in_words(found)
    print("\n".join(words))
    about = _about([bench for bench, _ in chosen])
    text = "\n\n".join((about, "\n".join(f"* {line}" for line in words), markdown(found).rstrip()))
    (folder / "network.md").write_text(text + "\n")
    from bench.network_plots import draw

    for bench, _ in chosen:
        drawn = {
            name.partition(" / ")[2]: [(at, loss) for _, at, loss in jobs[0]["validation"]]
            for name, jobs in results.data["curves"].items()
            if jobs and name.startswith(f"{bench.name} /")
        }
        if drawn:
            draw(
                folder / f"network-{bench.name.lower()}.png",
                f"network {bench.name}",
                "seconds (log)",
                drawn,
                _target(results.data, bench.baseline),
            )


def _about(benches: Sequence[Bench]) -> str:
    """The text above the table."""
    models = "; ".join(
        f"{bench.name}: width {bench.model.width}, sequence {bench.model.sequence}, {bench.microbatches} microbatches of "
        f"{bench.microbatch_size}"
        for bench in benches
    )
    return f"""# Training over slow links, measured

`make bench-network` makes this page: a GPT of {benches[0].model.blocks} blocks on the standard library's text, trained by real peers in
network namespaces on {os.cpu_count()} cores that all of them share ({models}). Networks:
`tests/box/networks`. Seconds are those of a step: the median over jobs that ran in turn, and in brackets the least and
most of single jobs. "Speed-up" is against equal-ops, dense, of the same network. "Apart" is what the same simulator says
of peers that are machines of their own, as volunteers' are. "Bound" is the busiest link, line or stage of the placement,
at the network's whole rate, or the machine's cores, busy all the time. "Loss" is that of training after the few steps of
a timed job; "to loss" the wall-clock time to the baseline's last validation loss."""
