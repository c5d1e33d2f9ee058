"""The items of a response's input, and the chat messages that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from fusion.runtime.serving.http.generation_fields import MAX_NAME, Body
from fusion.runtime.serving.http.schema import CalledFunction, Message, TextPart, ToolCall

Texts = str | Annotated[list[TextPart], Field(fail_fast=True)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    arguments: str = "{}"


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(Body):
    """Ignored: earlier reasoning is not shown to the model again."""

    type: Literal["reasoning"]


KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else value.type
    return "message" if kind is None else str(kind)


def _known(value: Any) -> Any:
    """One clear line for an unknown kind, for which pydantic would list all that there are."""
    if not isinstance(value, dict):
        raise ValueError("an item is an object, such as a message")
    kind = value.get("type")
    if kind == "item_reference":
        raise ValueError(
            "item_reference: nothing is kept here; send the item itself (clients do with store: false)"
        )
    if kind is None or kind in KINDS:
        return {**value, "type": kind or "message"}
    raise ValueError(f"items are messages, function calls and their outputs here, not {str(kind)[:40]!r}")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
KnownItem = Annotated[Item, BeforeValidator(_known, json_schema_input_type=Item)]


def items_of(value: Any) -> Any:
    """A plain text stands for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Function calls join the assistant's message before them, or get one of their own."""
    messages = list[Message]()
    calls: list[ToolCall] | None = None  # of the last message, where it is the assistant's
    for item in items:
        match item:
            case MessageItem():
                calls = [] if item.role == "assistant" else None
                messages.append(Message(role=item.role, content=item.content))
            case FunctionCallItem():
                if calls is None:
                    calls = []
                    messages.append(Message(role="assistant"))
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls.append(ToolCall(id=item.call_id, function=function))
                if len(calls) == 1:
                    messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
            case FunctionCallOutputItem():
                calls = None
                messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
    return messages
