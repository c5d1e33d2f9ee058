"""A check of a chat template when a model is served: one message, and one with a tool where there is a template for tools."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fusion.runtime.serving.requests.chat_format import ChatFormat, format_of
from fusion.runtime.serving.requests.chat_template import ChatTemplates, TemplateFailed, TemplatesBusy
from fusion.swarm.directory.records import JobId

_MESSAGE = {"role": "user", "content": "Hello"}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_NAME = JobId("trial")


def chat_fault(files: Mapping[str, bytes]) -> str:
    """`template_fault` of the templates among a model's files, as `chat_files` returns them; "" without any. Blocks for as long as a
    template may take: run it in a thread."""
    return asyncio.run(template_fault(format_of(files))) if files else ""


async def template_fault(form: ChatFormat) -> str:
    """One line on what is wrong with the templates; "" where nothing is."""
    templates = ChatTemplates()
    try:
        for tools in ([], [_TOOL]) if form.tool_template is not None else ([],):
            variables = form.variables([_MESSAGE], tools)
            await templates.render(_NAME, form.template_for(tools), variables)
    except TemplateFailed as error:
        what = "template for tools" if tools else "template"
        return f"its chat {what} does not take a plain message, and chats will get an error: {error}"
    except TemplatesBusy:
        return ""
    finally:
        await templates.aclose()
    return ""
