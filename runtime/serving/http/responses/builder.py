"""One response as the Responses API writes it: the response object, and the events of its stream, of which the last holds that object.
Pure, but for random ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.generate_requests import TEMPERATURE
from fusion.runtime.serving.http.responses.schema import ResponsesRequest
from fusion.runtime.serving.http.shapes import ChatReader, Json, call_id, usage
from fusion.runtime.serving.http.tool_calls import Call
from fusion.runtime.serving.requests.request import Answer

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseBuilder:
    """Call `begin`, then `add` with each part of the completion, or `fail`. Each returns the events that a stream sends at that point.
    `whole` is the response so far."""

    def __init__(self, body: ResponsesRequest, model: str, created: int, prompt_tokens: int) -> None:
        """`model`: as the client called it; `created`: unix seconds."""
        chat = body.chat
        several = body.parallel_tool_calls is not False
        self._reader = ChatReader(chat.tool_names, several=several, must=chat.must_call)
        self._id = _new_id("resp")
        self._echoed = _echoed(body, model, created)
        self._prompt_tokens = prompt_tokens
        self._status: Status = "in_progress"
        self._error: Json | None = None
        self._usage: Json | None = None
        self._output = list[Json]()  # the finished items
        self._message = ""  # id of the message that is still open; "": none is
        self._text = list[str]()
        self._events = 0

    @property
    def whole(self) -> Json:
        """An object of kind response."""
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        output = [*self._output, *([self._written_message("incomplete")] if self._message else [])]
        return {
            "id": self._id,
            "object": "response",
            **self._echoed,
            "status": self._status,
            "error": self._error,
            "incomplete_details": incomplete,
            "output": [] if self._status == "in_progress" else output,
            "usage": self._usage,
        }

    def begin(self) -> list[Json]:
        return [self._event(f"response.{kind}", response=self.whole) for kind in ("created", "in_progress")]

    def add(self, part: Part) -> list[Json]:
        text, calls = self._reader.read(part)
        ends = isinstance(part.output, Answer)
        events = list[Json]()
        if not self._message and (text or (ends and not calls)):
            events += self._open_message()
        if text:
            self._text.append(text)
            events.append(self._text_event("delta", delta=text, logprobs=[]))
        if isinstance(part.output, Answer):
            events += self._end(part.output, calls)
        return events

    def fail(self, error: ApiError) -> list[Json]:
        self._status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._error = {"code": code, "message": error.body["error"]["message"]}
        return [self._event("response.failed", response=self.whole)]

    def _end(self, answer: Answer, calls: Sequence[Call]) -> list[Json]:
        status: Status = "incomplete" if answer.finish == "length" else "completed"
        events = self._close_message("completed" if calls else status) if self._message else []
        for call in calls:
            events += self._call(call)
        self._status = status
        self._usage = _usage(self._prompt_tokens, answer)
        return [*events, self._event(f"response.{status}", response=self.whole)]

    # --- the items of its output

    def _open_message(self) -> list[Json]:
        self._message = _new_id("msg")
        item = {**self._written_message("in_progress"), "content": []}
        return [self._item_event("added", item), self._part_event("added", _text_part(""))]

    def _close_message(self, status: Status) -> list[Json]:
        item = self._written_message(status)
        [part] = item["content"]
        events = [
            self._text_event("done", text=part["text"], logprobs=[]),
            self._part_event("done", part),
            self._item_event("done", item),
        ]
        self._output.append(item)
        self._message = ""
        return events

    def _written_message(self, status: Status) -> Json:
        text = _text_part("".join(self._text))
        return {
            "id": self._message,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [text],
        }

    def _call(self, call: Call) -> list[Json]:
        about = {"id": _new_id("fc"), "type": "function_call", "call_id": call_id(), "name": call.name}
        status = "completed" if call.whole else "incomplete"
        item = {**about, "arguments": call.arguments, "status": status}
        where = {"item_id": about["id"], "output_index": len(self._output)}
        arguments = "response.function_call_arguments"
        events = [
            self._item_event("added", {**about, "arguments": "", "status": "in_progress"}),
            self._event(f"{arguments}.delta", **where, delta=call.arguments),
            self._event(f"{arguments}.done", **where, name=call.name, arguments=call.arguments),
            self._item_event("done", item),
        ]
        self._output.append(item)
        return events

    # --- events

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._events = self._events, self._events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item_event(self, what: str, item: Json) -> Json:
        return self._event(f"response.output_item.{what}", output_index=len(self._output), item=item)

    def _part_event(self, what: str, part: Json) -> Json:
        return self._event(f"response.content_part.{what}", **self._place, part=part)

    def _text_event(self, what: str, **fields: Any) -> Json:
        return self._event(f"response.output_text.{what}", **self._place, **fields)

    @property
    def _place(self) -> Json:
        """Where the text of the open message is."""
        return {"item_id": self._message, "output_index": len(self._output), "content_index": 0}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(prompt_tokens: int, answer: Answer) -> Json:
    used = usage(prompt_tokens, [answer])
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }


def _echoed(body: ResponsesRequest, model: str, created: int) -> Json:
    """The fields of a response that repeat its request."""
    choice, tools = body.tool_choice, body.tools or ()
    form = body.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "created_at": created,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": TEMPERATURE if body.temperature is None else body.temperature,
        "text": {"format": form},
        "tool_choice": (choice or "auto") if isinstance(choice, str | None) else choice.model_dump(),
        "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in tools],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
