"""Answers as OpenAI's API writes them: whole, or in chunks. Pure, but for ids that are drawn."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.tool_calls import Call, ToolCallStream
from fusion.runtime.serving.requests.request import Answer, Piece

Json = dict[str, Any]


class Shape(Protocol):
    """One request's answers; what is sent of each is remembered."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def begin(self, choice: int) -> list[Json]:
        """What a stream begins with for one answer: entries of `choices`."""

    def chunks(self, part: Part) -> list[Json]:
        """Likewise, what comes with `part`."""

    def whole(self, choice: int, pieces: Sequence[Piece], answer: Answer) -> Json:
        """One entry of `choices` for a whole answer."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What every object of one request says."""

    id: str
    created: int  # unix seconds
    model: str  # as the client called it
    fingerprint: str  # of the model behind the name

    def object(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
            **more,
        }


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> Json:
    """`prompt_tokens`: of all prompts, each once."""
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


class _Sent:
    """How much of each answer's text has been sent: the last piece of it may be held back until the end."""

    def __init__(self) -> None:
        self._length: dict[int, int] = {}

    def next(self, part: Part) -> str:
        sent = self._length.get(part.choice, 0)
        text = part.said.text[sent:] if isinstance(part.said, Answer) else part.said.text
        self._length[part.choice] = sent + len(text)
        return text


class CompletionShape:
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self) -> None:
        self._sent = _Sent()

    def begin(self, choice: int) -> list[Json]:
        return []

    def chunks(self, part: Part) -> list[Json]:
        text = self._sent.next(part)
        if isinstance(part.said, Answer):
            return [_completion(part.choice, text, finish_reason(part.said))]
        return [_completion(part.choice, text, None)] if text else []

    def whole(self, choice: int, pieces: Sequence[Piece], answer: Answer) -> Json:
        return _completion(choice, answer.text, finish_reason(answer))


def _completion(choice: int, text: str, finish: str | None) -> Json:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": finish}


class ChatShape:
    """`tools`: the names of those that the model was told of."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tools: Collection[str]) -> None:
        self._sent = _Sent()
        self._tools = tools
        self._reading: dict[int, ToolCallStream] = {}

    def begin(self, choice: int) -> list[Json]:
        return [_delta(choice, {"role": "assistant", "content": ""})]

    def chunks(self, part: Part) -> list[Json]:
        text, calls = self._read(part)
        found = [_delta(part.choice, {"content": text})] if text else []
        if isinstance(part.said, Answer):
            if calls:
                found.append(_delta(part.choice, {"tool_calls": _calls(calls, indexed=True)}))
            found.append(_delta(part.choice, {}, finish_reason(part.said, calls)))
        return found

    def whole(self, choice: int, pieces: Sequence[Piece], answer: Answer) -> Json:
        text, calls = self._read(Part(choice, answer))
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = _calls(calls)
        finish = finish_reason(answer, calls)
        return {"index": choice, "message": message, "logprobs": None, "finish_reason": finish}

    def _read(self, part: Part) -> tuple[str, tuple[Call, ...]]:
        text = self._sent.next(part)
        if not self._tools:
            return text, ()
        reading = self._reading.setdefault(part.choice, ToolCallStream(self._tools))
        text = reading.push(text)
        if not isinstance(part.said, Answer):
            return text, ()
        rest, calls = reading.finish()
        return text + rest, calls


def _delta(choice: int, delta: Json, finish: str | None = None) -> Json:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish}


def _calls(calls: Sequence[Call], *, indexed: bool = False) -> list[Json]:
    return [
        {
            **({"index": number} if indexed else {}),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def finish_reason(answer: Answer, calls: Sequence[Call] = ()) -> str:
    if answer.finish == "length":
        return "length"
    return "tool_calls" if calls else "stop"
