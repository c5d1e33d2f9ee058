"""Whether the stages of a completion are alive and make progress: they are pinged after an unusually long silence."""

from __future__ import annotations

from collections.abc import Callable

from fusion.runtime.serving.answers.failover import FailoverConfig, Fault, Faulted, SilenceTimeout
from fusion.runtime.serving.answers.gateway_session import GatewaySession


class Liveness:
    def __init__(self, config: FailoverConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._since = clock()  # of the last progress
        self._timeout = SilenceTimeout(config, self._since)
        # When the stages were pinged, 0 if not since the last event; the chunks that each had run by then.
        self._pinged_at = 0.0
        self._ran: dict[int, int] = {}

    @property
    def stalled_seconds(self) -> float:
        """Since the last progress."""
        return self._clock() - self._since

    @property
    def patience_seconds(self) -> float:
        """Timeout for the next event."""
        return self._config.ping_seconds if self._pinged_at else self._timeout.quiet_seconds()

    def begin(self) -> None:
        """A session begins."""
        self._pinged_at = 0.0
        self._timeout.begin(self._clock())

    def received(self) -> None:
        self._pinged_at = 0.0

    def token(self, now: float, guessed: bool) -> None:
        self._since = now
        self._timeout.token(now, guessed)

    def silence(self, session: GatewaySession) -> None:
        """On a timeout: ping every stage, or see which have not answered the last ping. Raises Faulted for stages that are silent, still
        loading, or stuck."""
        now = self._clock()
        if not self._pinged_at:
            self._pinged_at, self._ran = now, dict(session.ran)
            session.ping()
            return
        silent = tuple(
            stage for stage, received_at in session.received_at.items() if received_at < self._pinged_at
        )
        self._pinged_at = 0.0
        if silent:
            raise Faulted(Fault("silent", f"{session.where(silent[0])} does not answer", silent))
        if session.waiting:
            stage = min(session.waiting)
            if now - self._since >= self._config.recover_seconds:
                raise Faulted(Fault("absent", f"{session.where(stage)} is still being loaded", (stage,)))
        elif session.ran != self._ran:
            self._since = now  # slow, but making progress
        elif self._timeout.no_progress():
            name = session.model.manifest.name
            raise Faulted(Fault("stuck", f"{name}: its stages answer, but no token comes"))
