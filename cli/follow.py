"""Show how a job goes on: a live line for people, JSON lines for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.cli import job_client
from fusion.cli.terminal.output import Output, busy_text, bytes_text, rate_text

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.job.progress import Progress
    from fusion.swarm.directory.records import JobId


async def follow(context: Context, job: JobId, output: Output) -> Progress:
    """Show the job until it has ended. Returns its last progress. Raises JobFailed if it failed."""
    from fusion.runtime.job.errors import JobFailed

    shown = Shown()
    last: Progress | None = None
    async for progress in job_client.watch(context, job):
        last = progress
        output.emit({"event": "progress", **shown.record(progress)})
        validated = shown.new_validation(progress)
        if validated is not None:
            output.note(validated)
        output.status(progress_line(progress))
    output.end_status()
    assert last is not None  # `watch` yields at least once or raises
    if last.state == "failed":
        raise JobFailed(f"the job failed: {last.error or last.message or 'no reason given'}")
    return last


class Shown:
    """Tracks what has been shown, so that each loss and each validation is shown once."""

    def __init__(self) -> None:
        self._next = 0  # steps count from 0
        self._validated = 0

    def record(self, progress: Progress) -> dict[str, Any]:
        """The JSON object: the progress, with the losses of the steps not shown before as `losses`."""
        record = progress.to_header()
        record["losses"] = [pair for pair in record.pop("recent") if pair[0] >= self._next]
        self._next = max([self._next, *(step + 1 for step, _ in progress.recent)])
        return record

    def new_validation(self, progress: Progress) -> str | None:
        """A lasting line where there is a new loss on held-out data."""
        loss = progress.validation_loss
        if loss is None or progress.validation_step <= self._validated:
            return None
        self._validated = progress.validation_step
        return f"step {progress.validation_step:>6}  held-out loss {loss:.4f}"


def progress_line(progress: Progress) -> str:
    """E.g. "running  step 120/400  loss 1.931  12.3k tokens/s  busy 81% 79% 84%  wire 412.0 MiB"."""
    parts: list[str] = [progress.state]
    if progress.steps:
        parts.append(f"step {progress.step}/{progress.steps}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.tokens_per_second:
        parts.append(f"{rate_text(progress.tokens_per_second)} tokens/s")
    if progress.busy:
        parts.append(f"busy {busy_text(progress.busy)}")
    if progress.sent_bytes:
        parts.append(f"wire {bytes_text(progress.sent_bytes)}")
    if progress.codecs:
        parts.append(progress.codecs)
    if progress.losses:
        parts.append(f"lost {progress.losses} {'owner' if progress.losses == 1 else 'owners'}")
    if progress.discarded or progress.replayed:
        parts.append(f"discarded {progress.discarded}, replayed {progress.replayed}")
    if progress.message:
        parts.append(progress.message)
    return "  ".join(parts)
