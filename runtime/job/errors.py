"""What can go wrong in a job. Users see the message, in one line."""

from __future__ import annotations

from fusion.swarm.printable import error_line


class JobError(ValueError):
    """A job file, a model directory or a request that cannot work; names the field and what would be right."""


class CaptureError(JobError):
    """The model cannot be captured as an operator DAG; names the operator or the construct."""


class Refused(JobError):
    """A stage that this peer does not run; others may."""


class Understated(Refused):
    """A stage that needs more memory than its manifest states, or takes far longer."""


class Unsupported(Refused):
    """A stage of a graph that this peer's software does not know, perhaps of a newer release."""


class JobFailed(RuntimeError):
    """A running job that cannot go on; says why."""


class Unrunnable(JobFailed):
    """A job that no peer could run, nor another job of its graph and cuts; says why."""


class StagesFull(JobFailed):
    """The peers that run some stage of the model have no room for another session now; names them."""


class StageFailed(RuntimeError):
    """A stage that fails at this peer, and may run at another; says why."""


class NoRoute(RuntimeError):
    """No live owner for some stage of the model; names the stage."""


def first_cause(group: BaseExceptionGroup[BaseException]) -> RuntimeError:
    """Of several tasks that failed, the first one's error, in one line."""
    return RuntimeError(error_line(group.exceptions[0]))
