"""The fields of a responses request, and the chat request that it stands for. As in a chat request, unknown fields are ignored,
and fields that would change the response but are not supported are refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from fusion.runtime.serving.http.generation_fields import (
    MAX_NAME,
    Body,
    GenerationFields,
    NamedSchema,
    ResponseFormat,
    at_most,
)
from fusion.runtime.serving.http.responses.items import Item, KnownItem, items_of, messages_of
from fusion.runtime.serving.http.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedNames,
    AllowedTools,
    ChatRequest,
    ChosenFunction,
    Function,
    Message,
    Tool,
    ToolChoice,
)

MAX_METADATA, MAX_VALUE = 16, 512  # entries, and characters of each, as with OpenAI
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Function):
    type: Literal["function"]

    @property
    def tool(self) -> Tool:
        fields = self.model_dump(exclude_unset=True, exclude={"type"})
        return Tool(type="function", function=Function(**fields))


def _function_alone(tool: Any) -> Any:
    """Refuse tools that the client does not run itself; pydantic would only list the fields that they lack."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"tools are functions here, which the client runs, not {kind[:40]!r}")
    return tool


OfferedTool = Annotated[FunctionTool, BeforeValidator(_function_alone, json_schema_input_type=FunctionTool)]


class NamedFunction(Body):
    type: Literal["function"]
    name: str

    @property
    def choice(self) -> ToolChoice:
        return ToolChoice(type="function", function=ChosenFunction(name=self.name))


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def choice(self) -> AllowedTools:
        names = AllowedNames(mode=self.mode, tools=[each.choice for each in self.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=names)


class TextFormat(Body):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("format: json_schema needs {name, schema}")
        return self


class TextSettings(Body):
    format: TextFormat | None = None


class Reasoning(Body):
    effort: Annotated[str, Field(max_length=MAX_NAME)] | None = None


Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=MAX_VALUE)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(at_most(MAX_METADATA, "entries")),
]


class ResponsesRequest(GenerationFields):
    """`store` is ignored: no response is stored."""

    format_field: ClassVar[str] = "text.format"
    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"), "max_output_tokens"
        ),
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: Annotated[
        list[KnownItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(
            items_of,
            json_schema_input_type=str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)],
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    store: bool | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request as a chat request, not validated again: every field has been."""
        instructions = [Message(role="system", content=self.instructions)] if self.instructions else []
        form, choice = self.format, self.tool_choice
        schema = None if form.schema_ is None else NamedSchema(schema_=form.schema_)
        return ChatRequest.model_construct(
            **{name: getattr(self, name) for name in GenerationFields.model_fields},
            messages=[*instructions, *messages_of(self.input)],
            max_completion_tokens=self.max_output_tokens,
            tools=None if self.tools is None else [each.tool for each in self.tools],
            tool_choice=choice if isinstance(choice, str | None) else choice.choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=ResponseFormat(type=form.type, json_schema=schema),
            reasoning_effort=self.reasoning and self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @model_validator(mode="after")
    def _unsupported(self) -> Self:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name):
                raise ValueError(f"{name}: nothing is kept here; send what was said before as input")
        if self.prompt:
            raise ValueError("prompt: none are kept here; say instructions and input")
        if self.background:
            raise ValueError("background: an answer is given to whoever waits for it, as a stream or whole")
        if self.truncation == "auto":
            raise ValueError("truncation: nothing of the input is left out here")
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            name = "top_logprobs" if self.top_logprobs else "include"
            raise ValueError(f"{name}: log-probabilities are told by /v1/chat/completions")
        if not self.chat.messages:
            raise ValueError("input: says nothing to the model")
        self.chat.check_tool_choice()
        return self
