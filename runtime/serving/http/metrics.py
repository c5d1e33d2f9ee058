"""What `/metrics` shows, in Prometheus' text format, from a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fusion.runtime.job.progress import StageLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "fusion_http_requests", "Requests by path and status.", ("path", "status"), registry=registry
        )
        self._running = Gauge(
            "fusion_answers_running", "Answers that are being given now.", registry=registry
        )
        self._prompt = Counter("fusion_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter(
            "fusion_prompt_tokens_cached",
            "Of these, tokens whose keys and values the stages had already.",
            registry=registry,
        )
        self._tokens = Counter("fusion_completion_tokens", "Tokens of answers.", registry=registry)
        self._first = Histogram(
            "fusion_time_to_first_token_seconds",
            "From a request to the first token of its answer.",
            buckets=FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "fusion_time_between_tokens_seconds",
            "From one token of an answer to the next.",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )

    def add(self, collector: Collector) -> None:
        """Show what `collector.collect()` yields as well."""
        self._registry.register(collector)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    @contextmanager
    def answer(self) -> Iterator[Measured]:
        """Entered for as long as one completion is generated."""
        self._running.inc()
        try:
            yield Measured(self._clock, self._first, self._between, self._tokens, self._prompt, self._cached)
        finally:
            self._running.dec()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class StageLoads(Collector):
    """The loads of the stages that this peer runs."""

    def __init__(self, loads: Callable[[], Iterable[StageLoad]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        names = ("job", "stage")
        sessions = GaugeMetricFamily(
            "fusion_stage_sessions", "Sessions at a stage that runs here.", labels=names
        )
        kv_bytes = GaugeMetricFamily(
            "fusion_stage_kv_bytes", "Set aside for their keys and values.", labels=names
        )
        retained = GaugeMetricFamily(
            "fusion_stage_retained_bytes",
            "Keys and values of sessions that have ended, until others need the memory.",
            labels=names,
        )
        tokens = CounterMetricFamily(
            "fusion_stage_tokens", "Tokens that a first stage here has passed.", labels=names
        )
        for load in self._loads():
            labels = (load.job[:12], str(load.stage))
            sessions.add_metric(labels, load.sessions)
            kv_bytes.add_metric(labels, load.kv_bytes)
            retained.add_metric(labels, load.retained_bytes)
            tokens.add_metric(labels, load.tokens)
        yield from (sessions, kv_bytes, retained, tokens)


class Measured:
    """Measurements of one completion."""

    def __init__(
        self,
        clock: Callable[[], float],
        first: Histogram,
        between: Histogram,
        tokens: Counter,
        prompt: Counter,
        cached: Counter,
    ) -> None:
        self._clock = clock
        self._last = clock()
        self._next, self._between = first, between
        self._tokens, self._prompt, self._cached = tokens, prompt, cached

    def token(self) -> None:
        now = self._clock()
        self._next.observe(now - self._last)
        self._next, self._last = self._between, now
        self._tokens.inc()

    def prompt(self, tokens: int, cached: int) -> None:
        self._prompt.inc(tokens)
        self._cached.inc(cached)
