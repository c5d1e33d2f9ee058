"""What a request that ended by an error is answered."""

from __future__ import annotations

import pytest

from fusion.runtime.job.errors import JobError, JobFailed, NoRoute, StagesFull
from fusion.runtime.serving.grammar.matcher import TOO_MUCH, GrammarsBusy, GrammarTooCostly
from fusion.runtime.serving.http.errors import api_error


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (JobError("max_tokens: not 0"), 400, "max_tokens"),
        (GrammarTooCostly(TOO_MUCH), 400, "response_format"),
        (GrammarsBusy("response_format: later"), 429, None),
        (StagesFull("stage 1 is full"), 429, None),
        (NoRoute("nobody runs stage 1"), 503, None),
        (JobFailed("stage 1 failed"), 503, None),
        (TimeoutError(), 503, None),
        (KeyError("k"), 500, None),
    ],
)
def test_each_error_has_the_status_that_clients_act_on(
    error: Exception, status: int, param: str | None
) -> None:
    told = api_error(error)
    assert (told.status, told.param) == (status, param)
    assert ("Retry-After" in told.headers) == (status in (429, 503))
    assert told.body["error"]["message"]
