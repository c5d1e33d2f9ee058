from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from fusion.cli.terminal.options import grouped


@dataclass(frozen=True)
class Place:
    city: Annotated[str, typer.Option("--city")] = "Delft"
    floor: Annotated[int, typer.Option("--level", min=0)] = 0


@grouped
def greet(
    name: str,
    *,
    place: Place,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Say hello."""
    print(name, place, loud)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Ada"], f"Ada {Place()} False"),
        (["Ada", "--level", "2", "--loud"], f"Ada {Place(floor=2)} True"),
        (["Ada", "--city", "Bern"], f"Ada {Place(city='Bern')} False"),
    ],
)
def test_each_field_of_a_group_is_an_option(words: list[str], said: str) -> None:
    app = typer.Typer()
    app.command()(greet)
    assert CliRunner().invoke(app, words).output.strip() == said


def test_a_field_has_the_bounds_of_its_option() -> None:
    app = typer.Typer()
    app.command()(greet)
    assert CliRunner().invoke(app, ["Ada", "--level", "-1"]).exit_code == 2
