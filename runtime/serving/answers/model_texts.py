"""Text to token ids and back, with the tokenizers of the models that are served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.answers.text_threads import TextThreads
from fusion.runtime.serving.requests.request import GenerateRequest, check_size
from fusion.swarm.transport import PeerId

P = ParamSpec("P")
T = TypeVar("T")


class ModelTexts:
    """For each `holder`, whose share of the threads it takes. A tokenizer from somebody else runs in a thread; bytes take no time. All
    raise JobFailed where a tokenizer takes too long."""

    def __init__(self) -> None:
        # Apart from each other: a prompt takes seconds where it is long, and the text of every answer would wait for it.
        self._prompts, self._answers = TextThreads(), TextThreads()

    def close(self) -> None:
        """Wait for nothing."""
        self._prompts.close()
        self._answers.close()

    def of_prompt(
        self, model: ServedModel, holder: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """What `function` makes of a whole prompt, or of as much text."""
        return self._run(self._prompts, model, holder, function, *args, **kwargs)

    def of_answer(
        self, model: ServedModel, holder: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """What `function` makes of a few tokens."""
        return self._run(self._answers, model, holder, function, *args, **kwargs)

    async def encode(
        self, model: ServedModel, holder: PeerId, text: str, *, plain: bool = True
    ) -> tuple[int, ...]:
        """As `Text.encode`, one text of a `holder` at a time. JobError for a text that the model cannot take."""
        self.check(model, text)
        return tuple(await self.of_prompt(model, holder, model.text.encode, text, plain=plain))

    def check(self, model: ServedModel, text: str) -> None:
        """JobError for a text that the model cannot take, whatever tokens are made of it."""
        check_size(GenerateRequest(prompt=text), model.serve.longest_prompt)

    async def spell(self, model: ServedModel, holder: PeerId, tokens: Sequence[int]) -> list[bytes]:
        """As `Text.spell`, for each of them."""
        return await self.of_answer(model, holder, lambda: [model.text.spell(token) for token in tokens])

    async def _run(
        self,
        threads: TextThreads,
        model: ServedModel,
        holder: PeerId,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if model.manifest.tokenizer is None:
            return function(*args, **kwargs)
        return await threads.run(model.job, holder, function, *args, **kwargs)
