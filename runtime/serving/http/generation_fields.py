"""The fields that all requests for completions have: those of OpenAI's API that are supported, and a few that vLLM and others add.

Unknown fields are ignored, as OpenAI does. Fields that would change a completion but are not supported are refused
(`_unsupported`). Of a long list only the first wrong entry is reported (`fail_fast`): pydantic makes a kilobyte of each error, and
a body has room for millions of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fusion.runtime.serving.requests.ends import MAX_STOP_TOKENS
from fusion.runtime.serving.requests.json_schema import JSON_OBJECT, schema_text
from fusion.runtime.serving.requests.request import MAX_STOP_BYTES
from fusion.runtime.serving.requests.sampling_params import MAX_SEED

MAX_CHOICES = 16  # completions of one prompt
MAX_STOPS = 4
MAX_BIASED = 300
MAX_NAME = 256  # characters of a model's name
# Constrained output of vLLM, SGLang and llama.cpp: if these were ignored, the completion would be any text.
UNSUPPORTED_FORMATS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "ebnf", "regex", "json_schema"),
)
# Samplers that are not supported, each with the values that turn it off.
UNSUPPORTED_SAMPLERS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("typical_p", "tfs", "tfs_z"), (0.0, 1.0)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "smoothing_factor"), (0.0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "top_a", "no_repeat_ngram_size"), (0.0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0.0,)),
    "top_n_sigma": (-1.0, 0.0),
}
# Other fields of vLLM and OpenAI that would change the completion, and why they are not supported.
UNAVAILABLE: Mapping[str, str] = {
    "allowed_token_ids": "say logit_bias",
    "bad_words": "say logit_bias",
    "chat_template": "the model's own is rendered",
    "echo": "the prompt is not repeated here",
    "continue_final_message": "an answer is a message of its own",
    "include_stop_str_in_output": "a text of stop is no part of an answer",
    "logits_processors": "no code of a request is run",
    "prompt_embeds": "say prompt",
    "return_token_ids": "answers are told as text",
    "return_tokens_as_token_ids": "answers are told as text",
    "prompt_logprobs": "say echo and logprobs of /v1/completions, which tell of the prompt as well",
    "truncate_prompt_tokens": "nothing of a prompt is left out here",
    "use_beam_search": "there are no beams; ask for n",
    "web_search_options": "no tool is run here",
}

Id = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(max_length=MAX_STOP_BYTES)]


def _stops(value: Any) -> Any:
    """One text or several as a tuple. Empty texts are dropped, as in llama.cpp: clients send them for empty input fields."""
    texts = [value] if isinstance(value, str) else value
    return tuple(text for text in texts if text != "") if isinstance(texts, list | tuple) else value


def at_most(limit: int, what: str) -> Callable[[Any], Any]:
    """A validator that counts an object's entries first: pydantic validates every entry before it counts them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"at most {limit} {what}, not {len(value)}")
        return value

    return check


def unless_false(value: Any) -> Any:
    """None for false, which is what chat requests send."""
    return None if value is False else value


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_route: bool | None = None  # our extension: which peers run the stages


class NamedSchema(Body):
    """`name`, `description` and `strict` change nothing: the output always follows the schema."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """`schema` beside the type, without a name, is the form of llama.cpp, LM Studio and Together."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if self.type == "json_schema" and self.requested_schema is None:
            raise ValueError("json_schema needs {name, schema}")
        return self

    @property
    def requested_schema(self) -> dict[str, Any] | None:
        """The schema that the output must follow, if there is one."""
        return self.schema_ if self.json_schema is None else self.json_schema.schema_


class GenerationFields(Body):
    """The fields that all requests for text share. `None` stands for OpenAI's default: temperature 1, everything else off."""

    format_field: ClassVar[str] = "response_format"  # the field that has a schema for the output
    other_names: ClassVar[Mapping[str, str]] = {}  # field of another endpoint -> its name here
    # Fields of vLLM, each with the value that is not supported, and why.
    flags: ClassVar[Mapping[str, tuple[bool, str]]] = {
        "skip_special_tokens": (False, "special tokens are no text"),
        "add_special_tokens": (True, "a chat has the special tokens that its template writes"),
        "add_generation_prompt": (False, "an answer is a message of its own"),
    }

    unavailable: ClassVar[Mapping[str, str]] = UNAVAILABLE

    model: Annotated[str, Field(max_length=MAX_NAME)] = ""
    stream: bool | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[Number, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASED),
            BeforeValidator(at_most(MAX_BIASED, "tokens")),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: (
        Annotated[
            tuple[Stop, ...],
            Field(max_length=MAX_STOPS, fail_fast=True),
            BeforeValidator(_stops, Stop | list[Stop]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    user: str | None = None
    guesses: bool | None = None  # our extension: False turns speculative decoding off

    @model_validator(mode="before")
    @classmethod
    def _nothing_unavailable(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name in UNSUPPORTED_FORMATS:
            if fields.get(name):
                raise ValueError(f"{name}: say {cls.format_field}, with a JSON schema")
        for name, reason in cls.unavailable.items():
            value = fields.get(name)
            if value is not None and value is not False and value not in ([], ""):
                raise ValueError(f"{name}: {reason}")
        for name, neutral in UNSUPPORTED_SAMPLERS.items():
            if (value := fields.get(name)) is not None and value not in neutral:
                raise ValueError(f"{name}: say temperature, top_k, top_p, min_p or a penalty")
        for name, (unusual, reason) in cls.flags.items():
            if fields.get(name) is unusual:
                raise ValueError(f"{name}: {reason}")
        for name, here in cls.other_names.items():
            if fields.get(name) is not None and fields.get(here.partition(".")[0]) is None:
                raise ValueError(f"{name}: say {here}")
        return fields


class Settings(GenerationFields):
    """The fields that completions and chats share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def json_schema(self) -> str:
        """The schema of the output; "" where it may be any text. JobError names what is wrong with it."""
        form = self.response_format
        if form is None or form.type == "text":
            return ""
        return JSON_OBJECT if form.requested_schema is None else schema_text(form.requested_schema)

    @property
    def answers(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def echoes(self) -> bool:
        """Whether each completion begins with the prompt."""
        return False

    @property
    def usage_at_the_end(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def reports_route(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_route is True
