"""Errors as OpenAI's API reports them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fusion.runtime.job.errors import JobError, JobFailed, NoRoute, StagesFull
from fusion.runtime.serving.answers.gateway import BUSY
from fusion.runtime.serving.grammar.matcher import GrammarsBusy, GrammarTooCostly
from fusion.swarm.errors import NotAdmitted, RecordError, SwarmError
from fusion.swarm.printable import one_line

RETRY_SECONDS = 2
LINE_CHARACTERS = 500
# OpenAI's and vLLM's wording: LiteLLM, which many agents use, recognises the error by this text and not by a code.
TOO_LONG = "this model's maximum context length is exceeded"
_TYPES = {
    **dict.fromkeys((400, 404, 405, 408, 413, 415, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Field name in our own errors -> field name in the API.
_PARAMS = {"prompt_ids": "prompt", "answered": None, "json_schema": "response_format"}
_FIELDS = frozenset(
    {
        *(
            "model",
            "prompt",
            "prompt_ids",
            "max_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
        ),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "top_logprobs"),
        *("ignore_eos", "min_tokens", "stop_token_ids"),
        *("answered", "json_schema", "response_format", "input", "dimensions", "messages", "tools"),
        *("text", "max_output_tokens"),
    }
)
_NO_OTHER: Mapping[str, str] = {}
_OPTIONS = re.compile(r" \(--[^()]*\)$")  # a hint for users of the command line


class ApiError(Exception):
    """`param`: the field at fault, if there is one; `code`: a machine-readable reason."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": one_line(str(self), LINE_CHARACTERS),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> Mapping[str, str]:
        match self.status:
            case 401:
                return {"WWW-Authenticate": "Bearer"}
            case 429 | 503:
                return {"Retry-After": str(RETRY_SECONDS)}
        return {}


class Busy(ApiError):
    """This peer, or the peers that run the stages, have no capacity left."""

    def __init__(self, message: str = BUSY) -> None:
        super().__init__(429, message, code="busy")


def api_error(error: BaseException) -> ApiError:
    """The response for a request that ended with `error`."""
    match error:
        case ApiError():
            return error
        case NotAdmitted():
            return ApiError(403, str(error), param="model", code="not_admitted")
        case JobError() | GrammarTooCostly():
            return invalid(str(error))
        case GrammarsBusy():
            return Busy(str(error))
        case RecordError():
            return ApiError(400, str(error))
        case StagesFull():
            return Busy(str(error))
        case NoRoute() | JobFailed() | SwarmError() | TimeoutError():
            return ApiError(503, str(error) or "the swarm did not answer in time", code="model_unavailable")
    return ApiError(500, "a mistake of ours; the peer's log has it", code="internal_error")


@contextmanager
def attributed_to(field: str, other: Mapping[str, str] = _NO_OTHER) -> Iterator[None]:
    """Errors about the prompt name `field`, which it was made of, instead. `other`: further names to replace."""
    names = {"prompt": field, "prompt_ids": field, **other}
    try:
        yield
    except JobError as error:
        wrong, _, why = str(error).partition(": ")
        if wrong not in names:
            raise
        raise JobError(f"{names[wrong]}: {why}") from None
    except ApiError as error:
        if error.param is None or error.param not in other:
            raise
        name, why = other[error.param], str(error).removeprefix(f"{error.param}: ")
        raise ApiError(error.status, f"{name}: {why}", param=name, code=error.code) from None


def invalid(message: str) -> ApiError:
    """400 with one of our own messages, which begins with the name of the field at fault."""
    message = _OPTIONS.sub("", message)
    field = message.partition(":")[0]
    param = _PARAMS.get(field, field) if field in _FIELDS else None
    if "positions" in message and field in ("max_tokens", "max_output_tokens", "prompt", "input", "messages"):
        return ApiError(400, f"{message} ({TOO_LONG})", param=param, code="context_length_exceeded")
    return ApiError(400, message, param=param)
