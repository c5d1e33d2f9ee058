"""What `/metrics` says of the stages that run on this peer."""

from __future__ import annotations

from fusion.runtime.job.progress import StageLoad
from fusion.runtime.serving.http.metrics import Metrics, StageLoads
from fusion.swarm.directory.records import JobId


def test_every_stage_is_told_of_as_it_is_when_asked() -> None:
    running: list[StageLoad] = []
    metrics = Metrics()
    metrics.add(StageLoads(lambda: running))
    assert "fusion_stage_sessions{" not in metrics.text().decode()
    job = JobId("ab" * 32)
    running += [
        StageLoad(job=job, stage=0, sessions=3, kv_bytes=4096, retained_bytes=512, tokens=17),
        StageLoad(job=job, stage=2, sessions=0, kv_bytes=0, retained_bytes=0, tokens=0),
    ]
    lines = metrics.text().decode().splitlines()
    assert 'fusion_stage_sessions{job="abababababab",stage="0"} 3.0' in lines
    assert 'fusion_stage_kv_bytes{job="abababababab",stage="0"} 4096.0' in lines
    assert 'fusion_stage_retained_bytes{job="abababababab",stage="0"} 512.0' in lines
    assert 'fusion_stage_tokens_total{job="abababababab",stage="0"} 17.0' in lines
    assert 'fusion_stage_sessions{job="abababababab",stage="2"} 0.0' in lines
