"""The fields of a request: those of OpenAI's API that are supported, and a few that vLLM and others add.

Unknown fields are ignored, as OpenAI does. Fields that would change a completion but are not supported are refused
(`_unsupported`). Of a long list only the first wrong entry is reported (`fail_fast`): pydantic makes a kilobyte of each error, and
a body has room for millions of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fusion.runtime.serving.http.tool_calls import Parameters, schema_of_call
from fusion.runtime.serving.requests.ends import MAX_STOP_TOKENS
from fusion.runtime.serving.requests.json_schema import JSON_OBJECT, schema_text
from fusion.runtime.serving.requests.request import MAX_STOP_BYTES, MAX_TOP_LOGPROBS
from fusion.runtime.serving.requests.sampling_params import MAX_SEED

MAX_CHOICES = 16  # completions of one prompt
MAX_PROMPTS = 64
MAX_TEXTS = 2048  # of one embeddings request, as with OpenAI
MAX_ANSWERS = 64  # completions of one request
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_STOPS = 4
MAX_BIASED = 300
MAX_NAME = 256  # characters of a model's name
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
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


def _unless_false(value: Any) -> Any:
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


class CompletionRequest(Settings):
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"), "max_tokens"
    )
    flags = {name: flag for name, flag in GenerationFields.flags.items() if name != "add_special_tokens"}
    unavailable = {name: why for name, why in UNAVAILABLE.items() if name != "echo"}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    # 0, with `echo`: the prompt alone
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None, BeforeValidator(_unless_false)
    ] = None
    add_special_tokens: bool | None = None  # vLLM's: False for a text that has them already
    best_of: int | None = None
    suffix: str | None = None

    @property
    def echoes(self) -> bool:
        return self.echo is True

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        return _each(self.prompt)

    @model_validator(mode="after")
    def _unsupported(self) -> Self:
        if self.suffix:
            raise ValueError("suffix: models here go on from a prompt, they fill nothing in")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: at least 1, or 0 with echo, for the prompt alone")
        if self.best_of not in (None, self.answers):
            raise ValueError("best_of: every answer is given; ask for n")
        if len(self.prompts) * self.answers > MAX_ANSWERS:
            raise ValueError(f"n: at most {MAX_ANSWERS} answers to all prompts of a request together")
        return self


class EmbeddingRequest(Body):
    """`user` is ignored."""

    model: Annotated[str, Field(max_length=MAX_NAME)] = ""
    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None

    @property
    def texts(self) -> tuple[str | tuple[int, ...], ...]:
        return _each(self.input)

    @property
    def as_base64(self) -> bool:
        return self.encoding_format == "base64"


def _each(given: str | Sequence[Any]) -> tuple[str | tuple[int, ...], ...]:
    """One text, one list of token ids, or a list of either, as a tuple."""
    match given:
        case str() as text:
            return (text,)
        case [int(), *_] as ids:
            return (tuple(ids),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in given)


def _text_alone(kind: Any) -> Any:
    if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"parts are text here, not {kind[:40]!r}")
    return kind


class TextPart(Body):
    """A refusal is text of the conversation as well."""

    type: Annotated[Literal["text", "input_text", "output_text", "refusal"], BeforeValidator(_text_alone)]
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "refusal"))]


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    refusal: str | None = None
    function_call: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.function_call:
            raise ValueError("function_call: say tool_calls")
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError(f"content is missing: a text, or a list of parts, where role is {self.role}")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""


class Function(Body):
    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def call_parameters(self) -> Parameters:
        return Parameters(self.name, self.parameters, self.strict is True)


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedNames(Body):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class ChatRequest(Settings):
    other_names: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "max_completion_tokens",
        **dict.fromkeys(("max_new_tokens", "n_predict"), "max_tokens"),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    functions: list[Any] | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is offered."""
        match self.tool_choice:
            case "none":
                return ()
            case ToolChoice() as chosen:
                wanted = {chosen.function.name}
            case AllowedTools(allowed_tools=allowed):
                wanted = {each.function.name for each in allowed.tools}
            case _:
                return tuple(self.tools or ())
        return tuple(tool for tool in self.tools or () if tool.function.name in wanted)

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.offered_tools)

    @property
    def must_call(self) -> bool:
        """Whether the output must be a tool call."""
        match self.tool_choice:
            case AllowedTools(allowed_tools=allowed):
                return allowed.mode == "required"
            case ToolChoice():
                return True
        return self.tool_choice == "required"

    @property
    def json_schema(self) -> str:
        if not self.must_call:
            return super().json_schema
        functions = {tool.function.name: tool.function for tool in self.offered_tools}
        return schema_text(schema_of_call(each.call_parameters for each in functions.values()))

    @property
    def client_names(self) -> Mapping[str, str]:
        """Field name in our errors -> the field that the client set."""
        return dict.fromkeys(("json_schema", "response_format"), "tools") if self.must_call else {}

    @model_validator(mode="after")
    def _unsupported(self) -> Self:
        if self.functions:
            raise ValueError("functions: say tools")
        if set(self.modalities or ()) - {"text"}:
            raise ValueError("modalities: answers are text here")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        self.check_tool_choice()
        return self

    def check_tool_choice(self) -> None:
        """ValueError where it names tools that the request does not have."""
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required, and there are no tools")
        if isinstance(self.tool_choice, ToolChoice | AllowedTools) and not self.offered_tools:
            raise ValueError("tool_choice: names none of the tools")
