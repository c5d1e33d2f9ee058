"""Whether the stages of an answer are there and get on: asked for when nothing comes for longer than is usual."""

from __future__ import annotations

from collections.abc import Callable

from fusion.runtime.serving.answers.failover import FailoverConfig, Fault, Faulted, Pulse
from fusion.runtime.serving.answers.gateway_session import GatewaySession


class Liveness:
    def __init__(self, config: FailoverConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._since = clock()  # of the last progress
        self._pulse = Pulse(config, self._since)
        # When the stages were asked whether they are there, 0 if not since anything was heard; how far they were then.
        self._asked = 0.0
        self._ran: dict[int, int] = {}

    @property
    def stalled_seconds(self) -> float:
        """Since the last progress."""
        return self._clock() - self._since

    @property
    def patience_seconds(self) -> float:
        """For which nothing may come now."""
        return self._config.ping_seconds if self._asked else self._pulse.quiet_seconds()

    def begin(self) -> None:
        """A session begins."""
        self._asked = 0.0
        self._pulse.begin(self._clock())

    def received(self) -> None:
        self._asked = 0.0

    def token(self, now: float, guessed: bool) -> None:
        self._since = now
        self._pulse.token(now, guessed)

    def silence(self, session: GatewaySession) -> None:
        """Nothing came for too long: ask every stage, or see who has not answered. Faulted with what that shows."""
        now = self._clock()
        if not self._asked:
            self._asked, self._ran = now, dict(session.ran)
            session.ping()
            return
        silent = tuple(stage for stage, heard in session.heard.items() if heard < self._asked)
        self._asked = 0.0
        if silent:
            raise Faulted(Fault("silent", f"{session.where(silent[0])} does not answer", silent))
        if session.waiting:
            stage = min(session.waiting)
            if now - self._since >= self._config.recover_seconds:
                raise Faulted(Fault("absent", f"{session.where(stage)} is still being loaded", (stage,)))
        elif session.ran != self._ran:
            self._since = now  # slow, which is no fault
        elif self._pulse.asked():
            name = session.model.manifest.name
            raise Faulted(Fault("stuck", f"{name}: its stages answer, but no token comes"))
