"""What can go wrong in a job. Users see the message, in one line."""

from __future__ import annotations

from fusion.swarm.printable import error_line


class JobError(ValueError):
    """A job file, a model directory or a request that cannot work; names the field and what would be right."""


class CaptureError(JobError):
    """The model cannot be captured as an operator DAG; names the operator or the construct."""


class Refused(JobError):
    """A stage in which this peer has no part; others may."""


class Understated(Refused):
    """A stage that needs more than its manifest says, or takes far longer."""


class Unsupported(Refused):
    """A stage of a graph that this peer's software does not understand: a newer one's, perhaps."""


class JobFailed(RuntimeError):
    """A running job that cannot go on; says why."""


class Unrunnable(JobFailed):
    """A job that no peer could run, whichever others there are of its graph and cuts; says why."""


class StagesFull(JobFailed):
    """Those who run some stage of the model have no room for another answer now; says who."""


class StageFailed(RuntimeError):
    """A stage that does not work out at this peer, and may at another; says why."""


class NoRoute(RuntimeError):
    """No live owner for some stage of the model; names the stage."""


def first_cause(group: BaseExceptionGroup[BaseException]) -> RuntimeError:
    """Of several tasks that failed, the first one's error, in one line."""
    return RuntimeError(error_line(group.exceptions[0]))
