"""Requests of OpenAI's API: completions, chats, embeddings. The fields that they share are in
`fusion.runtime.serving.http.generation_fields`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, model_validator

from fusion.runtime.serving.http.generation_fields import (
    MAX_NAME,
    UNAVAILABLE,
    Body,
    GenerationFields,
    Ids,
    Settings,
    unless_false,
)
from fusion.runtime.serving.http.tool_calls import Parameters, schema_of_call
from fusion.runtime.serving.requests.json_schema import schema_text
from fusion.runtime.serving.requests.request import MAX_TOP_LOGPROBS

MAX_PROMPTS = 64
MAX_TEXTS = 2048  # of one embeddings request, as with OpenAI
MAX_ANSWERS = 64  # completions of one request
MAX_MESSAGES = 2048
MAX_TOOLS = 128
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens


class CompletionRequest(Settings):
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict"), "max_tokens"
    )
    flags: ClassVar[Mapping[str, tuple[bool, str]]] = {
        name: flag for name, flag in GenerationFields.flags.items() if name != "add_special_tokens"
    }
    unavailable: ClassVar[Mapping[str, str]] = {
        name: why for name, why in UNAVAILABLE.items() if name != "echo"
    }

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
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None, BeforeValidator(unless_false)
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
