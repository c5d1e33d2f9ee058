"""Completions as OpenAI's API writes them: whole, or in chunks. Pure, but for random ids."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.tool_calls import Call, ToolCallStream, call_cut_off
from fusion.runtime.serving.requests.request import Answer, Logprobs, Piece, PromptPiece

Json = dict[str, Any]


class Shape(Protocol):
    """The format of one request's completions; remembers how much of each has been sent."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def begin(self, choice: int) -> list[Json]:
        """The entries of `choices` that a stream begins with for one completion."""

    def chunks(self, part: Part) -> list[Json]:
        """The entries of `choices` for `part`."""

    def keep(self, choice: int, piece: PromptPiece | Piece) -> None:
        """Keep what `whole` needs of the next piece of a completion, or of its prompt."""

    def whole(self, choice: int, answer: Answer) -> Json:
        """The entry of `choices` for a whole completion, of which each piece was kept."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The fields that all objects of one response share."""

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
    """`prompt_tokens`: of all prompts, each counted once. The cached tokens are an average over the completions of a prompt."""
    completion = sum(len(answer.tokens) for answer in answers)
    prompts = sum(answer.prompt_tokens for answer in answers)
    cached = prompt_tokens * sum(answer.cached_tokens for answer in answers) // max(prompts, 1)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True)
class EncodedLists:
    """A JSON object of lists whose entries are already encoded."""

    lists: Mapping[str, Sequence[bytes]]

    def parts(self) -> Iterator[bytes]:
        between = b"{"
        for name, entries in self.lists.items():
            yield between + json_text(name) + b":["
            between = b""
            for entry in entries:
                yield between + entry
                between = b","
            between = b"],"
        yield b"]}"


def json_text(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_parts(value: object) -> list[bytes]:
    """As `json_text`, in parts, of a value that may contain `EncodedLists`."""
    encoded, marker = list[EncodedLists](), secrets.token_hex(16)

    def placeholder(each: object) -> str:
        assert isinstance(each, EncodedLists)
        encoded.append(each)
        return marker

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=placeholder)
    parts, *rest = ([each] for each in text.encode().split(json_text(marker)))
    for each, after in zip(encoded, rest, strict=True):
        parts += [*each.parts(), *after]
    return parts


class _EncodedLogprobs:
    """The log-probabilities of whole completions, encoded as each token arrives: to encode all of them at once would block the loop
    for seconds, and as objects they take ten times the memory."""

    def __init__(self) -> None:
        self._lists: dict[int, dict[str, list[bytes]]] = {}

    def add(self, choice: int, logprobs: Json | None) -> None:
        """`logprobs`: an object of lists."""
        for name, entries in (logprobs or {}).items():
            self._lists.setdefault(choice, {}).setdefault(name, []).extend(map(json_text, entries))

    def of(self, choice: int) -> EncodedLists | None:
        lists = self._lists.pop(choice, None)
        return None if lists is None else EncodedLists(lists)


class _Sent:
    """How much of each completion's text has been sent: the last piece of it may be held back until the end."""

    def __init__(self) -> None:
        self._length: dict[int, int] = {}

    def next(self, part: Part) -> str:
        if isinstance(part.output, PromptPiece):
            return part.output.text
        sent = self._length.get(part.choice, 0)
        text = part.output.text[sent:] if isinstance(part.output, Answer) else part.output.text
        self._length[part.choice] = sent + len(text)
        return text


Spelling = Mapping[int, bytes]  # token id -> its bytes, for every token that has a log-probability


def token_text(token: int, spelled: bytes) -> str:
    """A token as clients see it: its text, or its bytes where it is only part of a character."""
    if not spelled:
        return f"token_id:{token}"
    try:
        return spelled.decode()
    except UnicodeDecodeError:  # a part of a character, as OpenAI writes it
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionShape:
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, spelling: Spelling) -> None:
        self._sent = _Sent()
        self._logprob_entries = _EncodedLogprobs()
        self._spelling = spelling
        self._prompts: dict[int, list[str]] = {}

    def begin(self, choice: int) -> list[Json]:
        return []

    def chunks(self, part: Part) -> list[Json]:
        text = self._sent.next(part)
        if isinstance(part.output, Answer):
            return [_completion(part.choice, text, None, finish_reason(part.output))]
        logprobs = self._logprobs(part.output)
        return [_completion(part.choice, text, logprobs, None)] if text or logprobs else []

    def keep(self, choice: int, piece: PromptPiece | Piece) -> None:
        if isinstance(piece, PromptPiece):
            self._prompts.setdefault(choice, []).append(piece.text)
        self._logprob_entries.add(choice, self._logprobs(piece))

    def whole(self, choice: int, answer: Answer) -> Json:
        text = "".join([*self._prompts.pop(choice, []), answer.text])
        return _completion(choice, text, self._logprob_entries.of(choice), finish_reason(answer))

    def _logprobs(self, piece: PromptPiece | Piece) -> Json | None:
        if isinstance(piece, PromptPiece):
            return self._lists(piece.ids, piece.logprobs, piece.begins) if piece.logprobs else None
        if piece.logprob is None:
            return None
        return self._lists([piece.id], [Logprobs(piece.logprob, piece.top_logprobs)], [piece.begins])

    def _lists(self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], begins: Sequence[int]) -> Json:
        tops = [None if each is None else self._top(i, each) for i, each in zip(ids, logprobs, strict=True)]
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": [None if each is None else each.chosen for each in logprobs],
            "top_logprobs": tops,
            "text_offset": list(begins),
        }

    def _top(self, token: int, logprobs: Logprobs) -> Json:
        top = {self._text(token): logprobs.chosen}
        for other, value in logprobs.top:
            top.setdefault(self._text(other), value)  # of tokens with equal text the most probable one
        return top

    def _text(self, token: int) -> str:
        return token_text(token, self._spelling[token])


def _completion(choice: int, text: str, logprobs: Json | EncodedLists | None, finish: str | None) -> Json:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}


class ChatReader:
    """Splits the output of one request's completions into text and tool calls. `tools`: names of the tools that the model was offered.
    `several`: whether a completion may call more than one; if not, only the first call counts, as in vLLM. `must`: the output can be
    nothing but a call, so one that was cut off counts as well."""

    def __init__(self, tools: Collection[str], *, several: bool = True, must: bool = False) -> None:
        self._sent = _Sent()
        self._tools = tools
        self._several = several
        self._must = must
        self._reading: dict[int, ToolCallStream] = {}

    def read(self, part: Part) -> tuple[str, tuple[Call, ...]]:
        """Text that has become certain with this part; at the end of a completion its calls as well."""
        text = self._sent.next(part)
        if not self._tools:
            return text, ()
        reading = self._reading.setdefault(part.choice, ToolCallStream(self._tools))
        text = reading.push(text)
        if not isinstance(part.output, Answer):
            return text, ()
        rest, calls = reading.finish()
        if self._must and part.output.finish == "length" and not calls and (call := call_cut_off(rest)):
            return text, (call,)
        return text + rest, calls if self._several else calls[:1]


class ChatShape:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, reader: ChatReader, spelling: Spelling) -> None:
        self._reader = reader
        self._logprob_entries = _EncodedLogprobs()
        self._spelling = spelling

    def begin(self, choice: int) -> list[Json]:
        return [_delta(choice, {"role": "assistant", "content": ""})]

    def chunks(self, part: Part) -> list[Json]:
        text, calls = self._reader.read(part)
        logprobs = self._logprobs(part.output) if isinstance(part.output, Piece) else None
        deltas = [_delta(part.choice, {"content": text}, logprobs)] if text or logprobs else []
        if isinstance(part.output, Answer):
            if calls:
                deltas.append(_delta(part.choice, {"tool_calls": _calls(calls, indexed=True)}))
            deltas.append(_delta(part.choice, {}, None, finish_reason(part.output, calls)))
        return deltas

    def keep(self, choice: int, piece: PromptPiece | Piece) -> None:
        if isinstance(piece, Piece):
            self._logprob_entries.add(choice, self._logprobs(piece))

    def whole(self, choice: int, answer: Answer) -> Json:
        text, calls = self._reader.read(Part(choice, answer))
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = _calls(calls)
        finish, logprobs = finish_reason(answer, calls), self._logprob_entries.of(choice)
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, piece: Piece) -> Json | None:
        if piece.logprob is None:
            return None
        top = [self._entry(token, value) for token, value in piece.top_logprobs]
        return {"content": [{**self._entry(piece.id, piece.logprob), "top_logprobs": top}]}

    def _entry(self, token: int, logprob: float) -> Json:
        spelled = self._spelling[token]
        return {"token": token_text(token, spelled), "logprob": logprob, "bytes": list(spelled) or None}


def _delta(choice: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _calls(calls: Sequence[Call], *, indexed: bool = False) -> list[Json]:
    return [
        {
            **({"index": number} if indexed else {}),
            "id": call_id(),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def finish_reason(answer: Answer, calls: Sequence[Call] = ()) -> str:
    if answer.finish == "length":
        return "length"
    return "tool_calls" if calls else "stop"
