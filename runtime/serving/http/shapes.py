"""Answers as OpenAI's API writes them: whole, or in chunks. Pure, but for ids that are drawn."""

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
    """One request's answers; what is sent of each is remembered."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def begin(self, choice: int) -> list[Json]:
        """What a stream begins with for one answer: entries of `choices`."""

    def chunks(self, part: Part) -> list[Json]:
        """Likewise, what comes with `part`."""

    def keep(self, choice: int, piece: PromptPiece | Piece) -> None:
        """What `whole` tells of the next piece of an answer, or of its prompt."""

    def whole(self, choice: int, answer: Answer) -> Json:
        """One entry of `choices` for a whole answer, of which each piece was kept."""


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
    """`prompt_tokens`: of all prompts, each once. Of these, those are cached that the stages had for every answer to a prompt, on
    average."""
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
class Written:
    """An object of lists whose entries are JSON already."""

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
    """The same a part at a time, where there are `Written` in it."""
    written, mark = list[Written](), secrets.token_hex(16)

    def held(each: object) -> str:
        assert isinstance(each, Written)
        written.append(each)
        return mark

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=held)
    parts, *rest = ([each] for each in text.encode().split(json_text(mark)))
    for each, after in zip(written, rest, strict=True):
        parts += [*each.parts(), *after]
    return parts


class _WrittenLogprobs:
    """The log-probabilities of whole answers, written as each token comes: to write all of them at once would hold the loop for
    seconds, and as objects they take ten times the memory."""

    def __init__(self) -> None:
        self._lists: dict[int, dict[str, list[bytes]]] = {}

    def add(self, choice: int, told: Json | None) -> None:
        """`told`: an object of lists."""
        for name, entries in (told or {}).items():
            self._lists.setdefault(choice, {}).setdefault(name, []).extend(map(json_text, entries))

    def of(self, choice: int) -> Written | None:
        lists = self._lists.pop(choice, None)
        return None if lists is None else Written(lists)


class _Sent:
    """How much of each answer's text has been sent: the last piece of it may be held back until the end."""

    def __init__(self) -> None:
        self._length: dict[int, int] = {}

    def next(self, part: Part) -> str:
        if isinstance(part.said, PromptPiece):
            return part.said.text
        sent = self._length.get(part.choice, 0)
        text = part.said.text[sent:] if isinstance(part.said, Answer) else part.said.text
        self._length[part.choice] = sent + len(text)
        return text


Spelling = Mapping[int, bytes]  # of every token that a log-probability is told of


def token_text(token: int, spelled: bytes) -> str:
    """As a client sees a token: its text, or what it is of one."""
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
        self._told = _WrittenLogprobs()
        self._spelling = spelling
        self._prompts: dict[int, list[str]] = {}

    def begin(self, choice: int) -> list[Json]:
        return []

    def chunks(self, part: Part) -> list[Json]:
        text = self._sent.next(part)
        if isinstance(part.said, Answer):
            return [_completion(part.choice, text, None, finish_reason(part.said))]
        logprobs = self._logprobs(part.said)
        return [_completion(part.choice, text, logprobs, None)] if text or logprobs else []

    def keep(self, choice: int, piece: PromptPiece | Piece) -> None:
        if isinstance(piece, PromptPiece):
            self._prompts.setdefault(choice, []).append(piece.text)
        self._told.add(choice, self._logprobs(piece))

    def whole(self, choice: int, answer: Answer) -> Json:
        text = "".join([*self._prompts.pop(choice, []), answer.text])
        return _completion(choice, text, self._told.of(choice), finish_reason(answer))

    def _logprobs(self, piece: PromptPiece | Piece) -> Json | None:
        if isinstance(piece, PromptPiece):
            return self._lists(piece.ids, piece.logprobs, piece.begins) if piece.logprobs else None
        if piece.logprob is None:
            return None
        return self._lists([piece.id], [Logprobs(piece.logprob, piece.top_logprobs)], [piece.begins])

    def _lists(self, ids: Sequence[int], found: Sequence[Logprobs | None], begins: Sequence[int]) -> Json:
        tops = [None if each is None else self._top(i, each) for i, each in zip(ids, found, strict=True)]
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": [None if each is None else each.chosen for each in found],
            "top_logprobs": tops,
            "text_offset": list(begins),
        }

    def _top(self, token: int, found: Logprobs) -> Json:
        top = {self._text(token): found.chosen}
        for other, value in found.top:
            top.setdefault(self._text(other), value)  # of tokens that look alike the most probable one
        return top

    def _text(self, token: int) -> str:
        return token_text(token, self._spelling[token])


def _completion(choice: int, text: str, logprobs: Json | Written | None, finish: str | None) -> Json:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}


class ChatReader:
    """What the answers of one request say: text, and calls of tools. `tools`: the names of those that the model was told of.
    `several`: whether an answer may call more than one of them; of its calls the first is told otherwise, as with vLLM. `must`:
    whether it can be nothing but a call, so that what was cut off is one as well."""

    def __init__(self, tools: Collection[str], *, several: bool = True, must: bool = False) -> None:
        self._sent = _Sent()
        self._tools = tools
        self._several = several
        self._must = must
        self._reading: dict[int, ToolCallStream] = {}

    def read(self, part: Part) -> tuple[str, tuple[Call, ...]]:
        """What is text for certain now and was not before; at the end of an answer its calls as well."""
        text = self._sent.next(part)
        if not self._tools:
            return text, ()
        reading = self._reading.setdefault(part.choice, ToolCallStream(self._tools))
        text = reading.push(text)
        if not isinstance(part.said, Answer):
            return text, ()
        rest, calls = reading.finish()
        if self._must and part.said.finish == "length" and not calls and (call := call_cut_off(rest)):
            return text, (call,)
        return text + rest, calls if self._several else calls[:1]


class ChatShape:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, reader: ChatReader, spelling: Spelling) -> None:
        self._reader = reader
        self._told = _WrittenLogprobs()
        self._spelling = spelling

    def begin(self, choice: int) -> list[Json]:
        return [_delta(choice, {"role": "assistant", "content": ""})]

    def chunks(self, part: Part) -> list[Json]:
        text, calls = self._reader.read(part)
        logprobs = self._logprobs(part.said) if isinstance(part.said, Piece) else None
        found = [_delta(part.choice, {"content": text}, logprobs)] if text or logprobs else []
        if isinstance(part.said, Answer):
            if calls:
                found.append(_delta(part.choice, {"tool_calls": _calls(calls, indexed=True)}))
            found.append(_delta(part.choice, {}, None, finish_reason(part.said, calls)))
        return found

    def keep(self, choice: int, piece: PromptPiece | Piece) -> None:
        if isinstance(piece, Piece):
            self._told.add(choice, self._logprobs(piece))

    def whole(self, choice: int, answer: Answer) -> Json:
        text, calls = self._reader.read(Part(choice, answer))
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = _calls(calls)
        finish, logprobs = finish_reason(answer, calls), self._told.of(choice)
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
