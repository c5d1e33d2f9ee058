"""Options that say how the tokens of an answer are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli.terminal import options

if TYPE_CHECKING:
    from fusion.runtime.serving.requests.sampling_params import Sampling
    from fusion.swarm.errors import RemoteError

# More than any model has positions, or a vocabulary tokens: what a frame has no room for is refused before it is sent.
MOST_TOKENS = (1 << 31) - 1

JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        parser=options.a_path,
        help="File of a JSON schema that the answer must follow.",
    ),
]


@dataclass(frozen=True)
class TokenChoice:
    """The options that say how tokens are drawn, and which text ends them."""

    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the most probable token (greedy).")
    ] = 0.0
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", min=0, max=MOST_TOKENS, help="Sample from the k most probable tokens; 0: all."
        ),
    ] = 0
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Sample from the fewest tokens whose probabilities reach this sum."),
    ] = 1.0
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Same seed, same answer (with a temperature).")
    ] = None
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", help="Exclude tokens less probable than this share of the most probable one; 0: none."
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option("--repetition-penalty", help="Above 1: penalise tokens of the prompt and the answer."),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", help="Above 0: penalise tokens of the answer, by their count."),
    ] = 0.0
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Above 0: penalise tokens of the answer.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=VALUE", help="Added to a token's logit; may be repeated."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="The answer ends before this text; may be repeated."),
    ] = None

    def sampling(self) -> Sampling:
        """ValueError names the option that is out of range."""
        from fusion.runtime.serving.requests.sampling_params import Sampling

        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed or 0,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=tuple(options.parse_bias(entry) for entry in self.logit_bias or ()),
        )


# What a gateway calls that which it was asked, where that is wrong.
ASKED = frozenset(
    {
        *("model", "prompt", "prompt_ids", "features", "max_tokens"),
        *("stop", "logit_bias", "top_logprobs", "json_schema", "response_format"),
    }
)


def of_question(error: RemoteError) -> Exception:
    """The error; a ValueError where what we asked for is at fault."""
    field, colon, reason = str(error).partition(":")
    if field not in ASKED:
        return error
    return ValueError(f"{'json_schema' if field == 'response_format' else field}{colon}{reason}")


def schema(path: Path | None) -> str:
    """What the file holds, as it travels; "" without one. ValueError says in one line what is wrong with it."""
    from fusion.runtime.serving.requests.json_schema import MAX_SCHEMA_BYTES, checked_schema

    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            data = file.read(4 * MAX_SCHEMA_BYTES + 1)
        return checked_schema(data.decode("utf-8-sig"))  # editors of Windows write a mark first
    except OSError as error:
        raise ValueError(f"--json-schema: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--json-schema: {path} is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"--json-schema: {path}: {error}") from None
