"""A request to a gateway and its results: pieces, then the answer.

Sent over `/fusion/generate/1` and `/2` (`fusion.runtime.serving.answers.gateway` and `fusion.runtime.serving.requests.client`); loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import MAX_PROMPT_BYTES, MAX_SOURCE_BYTES
from fusion.runtime.serving.requests.ends import MODELS_OWN, WITH_ENDS, Ends
from fusion.runtime.serving.requests.header_fields import number, pack_tokens, pairs, unpack_tokens, whole
from fusion.runtime.serving.requests.json_schema import checked_schema
from fusion.runtime.serving.requests.sampling_params import GREEDY, MAX_SEED, Sampling
from fusion.swarm.authority.access import chain_of
from fusion.swarm.transport import PeerId

DEFAULT_MAX_TOKENS = 64
CHAT_TOKENS = 1024  # default of a chat's max_tokens, or as many as fit
MAX_TOKEN_BYTES = 16  # of text for each position, averaged over a prompt: tokens have about 4
MAX_ANSWERED = 30_000  # tokens of a completion that is resumed at another gateway: they are in the header
MAX_TOP_LOGPROBS = 20
PROMPT_PIECE_TOKENS = 128  # of an echoed prompt, in one frame or piece
LEAST_LOGPROB = -9999.0  # lower bound, in place of minus infinity, which JSON does not have
MAX_STOPS, MAX_STOP_BYTES = 16, 256
WITH_SCHEMA = "+schema"  # suffix of the kind of a prompt with a schema

# Not yet; an end token or a stop string; max_tokens reached.
Finish = Literal["", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request to a gateway. Exactly one of `prompt` and `prompt_ids`."""

    model: str = ""  # name of the served job, or its id; "" where the swarm serves only one
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None  # None: DEFAULT_MAX_TOKENS, or as many as the model has positions left
    sampling: Sampling = GREEDY
    seeded: bool = True  # False: the gateway draws a seed
    logits: bool = False  # send the logits that each token was sampled from (for checks: it costs bandwidth)
    # Tokens of this completion that another gateway sent before it vanished; they count towards `max_tokens`.
    answered: tuple[int, ...] = ()
    grants: tuple[bytes, ...] = ()  # with which the client may prompt a job that is not open to all
    # Log-probabilities of each token and of so many of the most probable ones, of the model's own distribution: before bias,
    # penalties and temperature. None: no log-probabilities.
    top_logprobs: int | None = None
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    ends: Ends = MODELS_OWN  # which tokens end it, and from which index on
    # `prompt` was rendered with the model's chat template: no special tokens are added to it, and `max_tokens` is reduced to the
    # positions that are left.
    chat: bool = False
    guesses: bool = True  # False: no speculative decoding; the completion is the same
    schema: str = ""  # that constrains the completion, from `checked_schema`; "": any text
    # Audio features for a speech model: float32, one channel after the other. Then `prompt_ids` are the decoder's prompt; None: its
    # default.
    features: bytes = b""
    # Return the prompt's own tokens too, with log-probabilities where `top_logprobs` is set; only from a gateway in this process.
    # `max_tokens` may then be 0.
    echo: bool = False

    def __post_init__(self) -> None:
        if self.features:
            if self.prompt is not None or len(self.features) % 4:
                raise JobError("features: float32 numbers, and no text beside them")
            if len(self.features) > MAX_SOURCE_BYTES:
                raise JobError(f"features: at most {MAX_SOURCE_BYTES} bytes, not {len(self.features)}")
        elif (self.prompt is None) == (self.prompt_ids is None):
            raise JobError("prompt: give either a text or token ids")
        if self.prompt is not None and not _is_text(self.prompt):
            raise JobError("prompt: a text that UTF-8 can hold")
        if self.chat and self.prompt is None:
            raise JobError("prompt: a chat is a text")
        if self.prompt_ids is not None and any(not -(2**63) <= i < 2**63 for i in self.prompt_ids):
            raise JobError("prompt_ids: numbers of at most 64 bits")
        least = 0 if self.echo else 1
        if self.most_tokens < least:
            raise JobError(f"max_tokens: at least {least}, not {self.max_tokens}")
        if self.echo and self.answered:
            raise JobError("echo: of an answer that begins")
        if len(self.answered) > MAX_ANSWERED or any(not 0 <= i < 2**63 for i in self.answered):
            raise JobError(f"answered: at most {MAX_ANSWERED} token ids")
        check_top_logprobs(self.top_logprobs)
        if len(self.stop) > MAX_STOPS:
            raise JobError(f"stop: at most {MAX_STOPS} texts, not {len(self.stop)}")
        if not all(_is_text(text) and 1 <= len(text.encode()) <= MAX_STOP_BYTES for text in self.stop):
            raise JobError(f"stop: texts of 1 to {MAX_STOP_BYTES} bytes of UTF-8")
        if self.ends.min_tokens > self.most_tokens:
            raise JobError(
                f"min_tokens: at most max_tokens, which is {self.most_tokens}, not {self.ends.min_tokens}"
            )
        if self.schema and (self.ends.ignore_eos or self.ends.min_tokens):
            name = "ignore_eos" if self.ends.ignore_eos else "min_tokens"
            raise JobError(f"{name}: an answer that follows a schema ends where its JSON does")

    @property
    def most_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def drawn(self, draw: Callable[[int], int]) -> GenerateRequest:
        """The request with a seed, `draw(MAX_SEED)` where it has none."""
        if self.seeded:
            return self
        return replace(self, sampling=replace(self.sampling, seed=draw(MAX_SEED)), seeded=True)

    @property
    def newer(self) -> bool:
        """Whether it uses features that older releases do not know and would ignore."""
        return (
            bool(self.sampling.newer or self.stop or self.chat or self.schema or self.features)
            or self.top_logprobs is not None
            or self.ends != MODELS_OWN
        )

    def to_frame(self) -> tuple[dict[str, Any], bytes]:
        """Header and payload of the `generate` frame. The payload is the prompt, UTF-8 text or ids, after the schema if there is one.
        A schema and `ends` are marked in the kind of the prompt, so that an older gateway refuses the request instead of taking the
        schema for a part of the prompt, or ignoring the ends."""
        if self.echo:
            raise JobError("echo: ask a peer's HTTP API, which tells of the prompt")
        header: dict[str, Any] = {"model": self.model}
        if self.max_tokens is not None:
            header["max_tokens"] = self.max_tokens
        header |= self.sampling.to_header()
        if not self.seeded:
            del header["seed"]
        if self.logits:
            header["logits"] = True
        if self.answered:
            header["answered"] = pack_tokens(self.answered)
        if self.grants:
            header["grants"] = list(self.grants)
        if self.top_logprobs is not None:
            header["top_logprobs"] = self.top_logprobs
        if self.stop:
            header["stop"] = list(self.stop)
        if not self.guesses:
            header["guesses"] = False
        if self.prompt is not None:
            kind, payload = "chat" if self.chat else "text", self.prompt.encode()
        elif self.features:
            header["features"] = len(self.features)
            kind, payload = "features", self.features + pack_tokens(self.prompt_ids or ())
        else:
            assert self.prompt_ids is not None
            kind, payload = "ids", pack_tokens(self.prompt_ids)
        if self.ends != MODELS_OWN:
            kind += WITH_ENDS
            header |= self.ends.to_header()
        if self.schema:
            schema = self.schema.encode()
            return {**header, "prompt": f"{kind}{WITH_SCHEMA}", "schema": len(schema)}, schema + payload
        return {**header, "prompt": kind}, payload

    @classmethod
    def from_frame(cls, header: Mapping[str, Any], payload: memoryview) -> GenerateRequest:
        """JobError names the field that is missing or wrong; RecordError for grants that are not valid."""
        model, kind = header.get("model", ""), header.get("prompt")
        if not isinstance(model, str):
            raise JobError("model: a name")
        schema = ""
        if isinstance(kind, str) and kind.endswith(WITH_SCHEMA):
            kind = kind.removesuffix(WITH_SCHEMA)
            schema, payload = split_schema(payload, whole(header, "schema", 0))
        ends = MODELS_OWN
        if isinstance(kind, str) and kind.endswith(WITH_ENDS):
            kind, ends = kind.removesuffix(WITH_ENDS), Ends.from_header(header)
        if kind not in ("text", "chat", "ids", "features"):
            raise JobError("prompt: text, chat, ids or features")
        if len(payload) > MAX_PROMPT_BYTES:
            raise JobError(f"prompt: at most {MAX_PROMPT_BYTES} bytes, not {len(payload)}")
        features = b""
        if kind == "features":
            features, payload = _split_features(payload, whole(header, "features", 0))
        text, ids = _read_prompt(payload, kind in ("text", "chat"))
        answered = header.get("answered", b"")
        if not isinstance(answered, bytes):
            raise JobError("answered: the bytes of token ids")
        stop = header.get("stop", [])
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise JobError("stop: a list of texts")
        return cls(
            model=model,
            prompt=text,
            prompt_ids=None if features and not ids else ids,
            max_tokens=None if header.get("max_tokens") is None else whole(header, "max_tokens", 0),
            sampling=Sampling.from_header(header),
            seeded="seed" in header,
            logits=header.get("logits") is True,
            answered=tuple(unpack_tokens(memoryview(answered))),
            grants=chain_of(header.get("grants")),
            top_logprobs=None if header.get("top_logprobs") is None else whole(header, "top_logprobs", 0),
            stop=tuple(stop),
            ends=ends,
            chat=kind == "chat",
            guesses=header.get("guesses") is not False,
            schema=schema,
            features=features,
        )


@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities of one token, of the model's own distribution: before bias, penalties and temperature. They are sent in
    the header of the token's frame."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the most probable first

    def to_header(self) -> dict[str, Any]:
        header: dict[str, Any] = {"logprob": self.chosen}
        if self.top:
            header["top_logprobs"] = [list(entry) for entry in self.top]
        return header

    @classmethod
    def from_header(cls, header: Mapping[str, Any], count: int) -> Logprobs:
        """`count`: how many of the most probable tokens were requested. JobError where the fields are not valid."""
        logprobs = cls(number(header, "logprob", 1.0), pairs(header, "top_logprobs", count))
        values = (logprobs.chosen, *(value for _, value in logprobs.top))
        if not all(LEAST_LOGPROB <= value <= 0.0 for value in values):
            raise JobError(f"logprob, top_logprobs: between {LEAST_LOGPROB:g} and 0")
        if not all(0 <= token < 2**63 for token, _ in logprobs.top):
            raise JobError("top_logprobs: token ids are 0 or more")
        return logprobs


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token of a completion, as it is generated."""

    index: int  # 0 for the first token after the prompt
    id: int
    text: str  # what has become certain; "" while a character is incomplete
    # Offset of the token's text in characters, some of which may be held back; at the gateway only, not sent.
    begins: int = 0
    logits: bytes = b""  # float32 (vocabulary,) where they were requested
    logprob: float | None = None  # of `id`, where `top_logprobs` was requested
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the most probable first
    route: tuple[PeerId, ...] = ()  # the peer of each stage; at the gateway only, not sent

    def to_header(self) -> dict[str, Any]:
        """Header of the `token` frame; `logits` are its payload."""
        header: dict[str, Any] = {"index": self.index, "id": self.id, "text": self.text}
        if self.logprob is not None:
            header |= Logprobs(self.logprob, self.top_logprobs).to_header()
        return header


@dataclass(frozen=True, kw_only=True)
class PromptPiece:
    """Some of an echoed prompt's tokens, in order; all come before the first token of the completion."""

    ids: tuple[int, ...]
    text: str  # what has become certain, as of a Piece
    begins: tuple[int, ...]  # offset of each token's text in the prompt, in characters
    # Where they were requested. The prompt's first token has none, as nothing comes before it.
    logprobs: tuple[Logprobs | None, ...] = ()
    route: tuple[PeerId, ...] = ()  # as of a Piece


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished completion; the last item of a stream of pieces."""

    text: str
    tokens: tuple[int, ...]  # an end token included
    finish: Finish
    prompt_tokens: int
    route: tuple[PeerId, ...]  # the peer of each stage
    seconds: float  # at the gateway, from the request to the last token
    cached_tokens: int = 0  # of the prompt, found in the stages' prefix caches


def check_size(request: GenerateRequest, max_sequence: int) -> None:
    """JobError in one line where the prompt's text is too long for any tokenization to fit: checked before the tokenizer runs, which
    takes time."""
    if request.prompt is not None:
        size, most = len(request.prompt.encode()), max_sequence * MAX_TOKEN_BYTES
        if size > most:
            raise JobError(
                f"prompt: {size} bytes of text; the model takes {max_sequence} positions, which hold at most {most}"
            )


def check_length(tokens: int, longest_prompt: int) -> None:
    """JobError in one line for more tokens than the longest prompt: checked before anything reads each of them."""
    if tokens > longest_prompt:
        raise JobError(f"prompt: {tokens} tokens; the model takes {longest_prompt} positions")


def check_prompt(prompt: Sequence[int], max_tokens: int, vocabulary: int, max_sequence: int) -> None:
    """JobError in one line where the model cannot take this prompt and generate `max_tokens`."""
    if not prompt:
        raise JobError("prompt: at least one token")
    for token in prompt:
        if not 0 <= token < vocabulary:
            raise JobError(f"prompt_ids: this model's tokens are 0 to {vocabulary - 1}, not {token}")
    if len(prompt) >= max_sequence:
        raise JobError(
            f"prompt: the model takes {max_sequence} positions and the prompt has {len(prompt)}, so no token can follow: "
            f"shorten it, or begin a new conversation"
        )
    if len(prompt) + max_tokens > max_sequence:
        raise JobError(
            f"max_tokens: the model takes {max_sequence} positions; the prompt has {len(prompt)}, "
            f"so at most {max_sequence - len(prompt)} tokens can follow, not {max_tokens}"
        )


def check_top_logprobs(count: int | None, name: str = "top_logprobs") -> None:
    """JobError in one line where the number is out of range."""
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise JobError(f"{name}: between 0 and {MAX_TOP_LOGPROBS}, not {count}")


def check_answered(answered: Sequence[int], max_tokens: int, vocabulary: int) -> None:
    """JobError in one line where these cannot be the beginning of a completion of `max_tokens`."""
    if any(token >= vocabulary for token in answered):
        raise JobError(f"answered: this model's tokens are 0 to {vocabulary - 1}")
    if len(answered) > max_tokens:
        raise JobError(f"answered: {len(answered)} tokens, and max_tokens is {max_tokens}")


def _split_features(payload: memoryview, size: int) -> tuple[bytes, memoryview]:
    """The features that a payload begins with, of so many bytes, and the rest. JobError where it has fewer."""
    if not 0 < size <= min(len(payload), MAX_SOURCE_BYTES):
        raise JobError("features: as many bytes as there are")
    return bytes(payload[:size]), payload[size:]


def _read_prompt(payload: memoryview, is_text: bool) -> tuple[str | None, tuple[int, ...] | None]:
    """A text or token ids, and None for the other. JobError where it is none."""
    if not is_text:
        return None, tuple(unpack_tokens(payload))
    try:
        return str(payload, "utf-8"), None
    except UnicodeDecodeError:
        raise JobError("prompt: UTF-8 text") from None


def split_schema(payload: memoryview, size: int) -> tuple[str, memoryview]:
    """The schema, the first `size` bytes of a payload, and the rest. JobError where it is not valid."""
    if not 0 < size <= len(payload):
        raise JobError("schema: as many bytes as it has")
    try:
        return checked_schema(str(payload[:size], "utf-8")), payload[size:]
    except UnicodeDecodeError:
        raise JobError("schema: UTF-8 text") from None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as a terminal of another encoding may give
        return False
    return True
