"""What a chaos run found, as one JSON object and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fusion.cli.local.chaos_plan import ChaosConfig, Fault
from fusion.cli.local.chaos_swarm import Injected
from fusion.cli.local.chaos_timeline import Timeline
from fusion.cli.terminal.output import Output, percentile

STALL_WINDOW_SECONDS = 20.0  # after a fault in which a pause is put down to it
LONG_SECONDS = 10.0  # a recovery for which the report tells what the lead waited for


@dataclass(kw_only=True)
class Run:
    """One run of the job to its end, or as far as it came."""

    timeline: Timeline
    shards: tuple[str, ...] | None = None  # of the final snapshot, by stage
    shard_step: int = 0

    @property
    def ledger(self) -> dict[str, Any]:
        """What the last lead says of the samples committed: the same in every run of one plan."""
        last = self.timeline.last
        return {key: last[key] for key in ("samples", "ledger") if last.get(key) not in (None, "")}


@dataclass(kw_only=True)
class ChaosReport:
    config: ChaosConfig
    plan: tuple[Fault, ...] = ()
    steps: int = 0
    quiet: Run | None = None
    faulted: Run | None = None
    injected: list[Injected] = field(default_factory=list)
    error: str = ""  # one line: why the run ended before its time
    last_lines: dict[str, str] = field(default_factory=dict)  # of each peer's stderr
    seconds: float = 0.0

    @property
    def differences(self) -> list[str]:
        """The differences from the quiet run, as lines; empty for an exact run."""
        quiet, faulted = self.quiet, self.faulted
        if quiet is None or faulted is None or quiet.shards is None or faulted.shards is None:
            return [self.error or "there is no final snapshot to compare"]
        found = [self.error] if self.error else []
        found += [
            f"stage {stage}: the final weights differ"
            for stage, (a, b) in enumerate(zip(quiet.shards, faulted.shards, strict=True))
            if a != b
        ]
        if not quiet.shard_step == faulted.shard_step == self.steps:
            found.append(f"the final snapshots are of steps {quiet.shard_step} and {faulted.shard_step}, "
                         f"not {self.steps}")  # fmt: skip
        if quiet.ledger != faulted.ledger:
            found.append(f"the ledgers of samples differ: {quiet.ledger} and {faulted.ledger}")
        return found

    @property
    def exact(self) -> bool:
        return not self.differences

    @property
    def goodput(self) -> float | None:
        """Committed steps a second over those of the quiet run."""
        if self.quiet is None or self.faulted is None:
            return None
        quiet, faulted = self.quiet.timeline.rate(), self.faulted.timeline.rate()
        return faulted / quiet if quiet > 0 else None

    def record(self) -> dict[str, Any]:
        timeline = self.faulted.timeline if self.faulted else None
        hits = [hit(done, timeline) for done in self.injected] if timeline else []
        losses = [each for each in hits if each["kind"] == "kill" and each["stage"] is not None]
        first = [each["recovery_seconds"] for each in losses if each["recovery_seconds"] is not None]
        new = [each["new_step_seconds"] for each in losses if each["new_step_seconds"] is not None]
        return {
            "exact": self.exact,
            "differences": self.differences,
            "goodput": _rounded(self.goodput),
            "kills": sum(done.fault.kind == "kill" for done in self.injected),
            "owner_kills": len(losses),
            "stops": sum(done.fault.kind == "stop" for done in self.injected),
            "partitions": sum(done.fault.kind == "partition" for done in self.injected),
            "recovery_p50_seconds": _rounded(percentile(first, 0.50)),
            "recovery_p95_seconds": _rounded(percentile(first, 0.95)),
            "recovery_max_seconds": _rounded(max(first, default=None)),
            "new_step_p50_seconds": _rounded(percentile(new, 0.50)),
            "new_step_p95_seconds": _rounded(percentile(new, 0.95)),
            "new_step_max_seconds": _rounded(max(new, default=None)),
            "unrecovered": len(losses) - len(first),
            "discarded_steps": timeline.discarded if timeline else 0,
            "replayed_steps": timeline.replayed if timeline else 0,
            "steps": self.steps,
            "quiet_steps_per_second": _rounded(self.quiet.timeline.rate() if self.quiet else None),
            "steps_per_second": _rounded(timeline.rate() if timeline else None),
            "ledger": self.faulted.ledger if self.faulted else {},
            "peers": self.config.peers,
            "standbys": self.config.standby_count,
            "seed": self.config.seed,
            "command": self.config.command,
            "faults": hits,
            "plan": [fault.record() for fault in self.plan],
            "last_words": self.last_lines,
            "seconds": round(self.seconds, 1),
        }


def hit(done: Injected, timeline: Timeline) -> dict[str, Any]:
    """One fault and what came of it."""
    # Who holds no stage is missed by nobody.
    missed = done.fault.kind == "kill" and done.stage is not None
    first, new = timeline.recovery(done.at) if missed else (None, None)
    lasting = done.at + done.fault.seconds
    stall = timeline.stall(done.at, lasting + STALL_WINDOW_SECONDS)
    slow = stall > LONG_SECONDS + done.fault.seconds
    return {
        **done.record(),
        "recovery_seconds": _rounded(first),
        "new_step_seconds": _rounded(new),
        "stall_seconds": round(stall, 3),
        "waits": timeline.waits(done.at, lasting + STALL_WINDOW_SECONDS)[:20] if slow else [],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def show(report: ChaosReport, output: Output) -> None:
    """For people: a line a fault, then the figures; how to repeat it where it is not exact."""
    record = report.record()
    output.table(
        "Faults",
        ("at", "what", "role", "stage", "to a commit", "to a new step", "longest pause"),
        [
            (
                f"{each['at_seconds']:.1f} s",
                each["kind"] + (f" {each['seconds']:.1f} s" if each["seconds"] else ""),
                each["role"] + (f", {len(each['peers'])} peers" if len(each["peers"]) > 1 else ""),
                "none" if each["stage"] is None else f"{each['stage']}{' (lead)' if each['lead'] else ''}",
                _seconds(each["recovery_seconds"]),
                _seconds(each["new_step_seconds"]),
                _seconds(each["stall_seconds"]),
            )
            for each in record["faults"]
        ],
    )
    for each in record["faults"]:
        for line in each["waits"]:
            output.print_line(f"   {each['kind']} of {each['role']}: {line}")
    output.print_line(
        f"{report.steps} steps under {record['kills']} kills, {record['stops']} stops, {record['partitions']} "
        f"partitions; seed {record['seed']}"
    )
    output.print_line(
        f"goodput    {record['goodput']} of the quiet run ({record['steps_per_second']} against "
        f"{record['quiet_steps_per_second']} steps/s)"
    )
    output.print_line(
        f"recovery   p50 {_seconds(record['recovery_p50_seconds'])}, p95 "
        f"{_seconds(record['recovery_p95_seconds'])}, max {_seconds(record['recovery_max_seconds'])} from the kill "
        f"of an owner to the next commit; p95 {_seconds(record['new_step_p95_seconds'])} to the next new step"
    )
    output.print_line(f"discarded  {record['discarded_steps']} steps, {record['replayed_steps']} replayed")
    if report.exact:
        output.print_line(
            "exact      yes: the weights of every stage are those of the quiet run, bit for bit"
        )
        return
    output.print_line("exact      NO: " + "; ".join(record["differences"]))
    output.print_line("last words of the peers:")
    for name, lines in record["last_words"].items():
        for line in lines.splitlines():
            output.print_line(f"   {name}: {line}")
    output.print_line("the faults were:")
    for fault in report.plan:
        output.print_line(f"   {fault}")
    output.print_line(f"repeat it with:\n   {report.config.command}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
