"""Labels and indices that number nothing of the model are refused where the job is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_module
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.datasets.dataset import Dataset
from fusion.runtime.datasets.numbered import check_numbered
from fusion.runtime.job.errors import JobError


class Scores(nn.Module):
    """Of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids.unsqueeze(1).long()).mean(1))  # type: ignore[no-any-return]


def graph(loss: Any, labels: torch.Tensor) -> Graph:
    example = {"ids": torch.zeros(2, 4, dtype=torch.int64), "labels": labels}
    return trained_graph(capture_module(Scores(), example, loss, loss_inputs=("labels",)))


def plain(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def likelihood(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(scores.log_softmax(-1).transpose(1, 2), labels.long(), ignore_index=255)


def of_floats(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.mean(1), labels.squeeze(-1).long())


def shifted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten() - 1)


def shares(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.mean(1), labels)


CASES: dict[str, tuple[Any, torch.Tensor]] = {
    "plain": (plain, torch.zeros(2, 4, dtype=torch.int64)),
    "likelihood": (likelihood, torch.zeros(2, 4, dtype=torch.uint8)),
    "of floats": (of_floats, torch.zeros(2, 1)),
    "shifted": (shifted, torch.zeros(2, 4, dtype=torch.int64)),
    "shares": (shares, torch.zeros(2, 3)),
}
IDS = np.array([[0, 4, 1, 2]] * 3)
CLASSES = r"the classes of the loss are 3, 0 to 2, or -100, which is ignored"


def filled(case: str, *labels: float) -> np.ndarray[Any, Any]:
    example = CASES[case][1].numpy()
    whole = np.zeros((3, *example.shape[1:]), example.dtype)
    whole.reshape(-1)[: len(labels)] = labels
    return whole


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return {case: graph(*given) for case, given in CASES.items()}


@pytest.mark.parametrize(
    ("case", "labels", "says"),
    [
        ("plain", (0, 3), rf"^data: labels is from 0 to 3; {CLASSES}$"),
        ("plain", (1, 0, -1), rf"^data: labels is from -1 to 1; {CLASSES}$"),
        ("plain", (-100, 7, -100), rf"labels is from 0 to 7; {CLASSES}"),
        ("likelihood", (254, 255), "labels is from 0 to 254; .*, or 255, which is ignored"),
        ("of floats", (2.9, 3.1), f"labels is from 0 to 3; {CLASSES}"),
        ("of floats", (float("inf"),), f"labels is from 0 to inf; {CLASSES}"),
    ],
)
def test_a_label_beyond_the_classes_is_refused(
    graphs: dict[str, Graph], case: str, labels: tuple[float, ...], says: str
) -> None:
    wrong, right = ({"ids": IDS, "labels": filled(case, *given)} for given in (labels, ()))
    with pytest.raises(JobError, match=says) as error:
        check_numbered(graphs[case], Dataset(wrong, None))
    assert "\n" not in str(error.value)
    with pytest.raises(JobError, match=r"^data, held out: labels"):
        check_numbered(graphs[case], Dataset(right, wrong))


@pytest.mark.parametrize(
    ("case", "labels"),
    [
        ("plain", (0, 1, 2)),
        ("plain", (-100,) * 12),
        ("likelihood", (2, 255)),
        ("of floats", (-0.5, 2.9)),  # as a cast has them
        ("shifted", (3,) * 12),  # what is computed before is not known here
        ("shares", (-9.5, 9.5)),
    ],
)
def test_what_a_loss_takes_is_let_through(
    graphs: dict[str, Graph], case: str, labels: tuple[float, ...]
) -> None:
    arrays = {"ids": IDS, "labels": filled(case, *labels)}
    check_numbered(graphs[case], Dataset(arrays, arrays))


def test_a_row_that_a_table_does_not_have_is_refused(graphs: dict[str, Graph]) -> None:
    arrays = {"ids": IDS + 1, "labels": filled("plain")}
    with pytest.raises(JobError, match=r"^data: ids is from 1 to 5; the rows of an embedding are 5, 0 to 4$"):
        check_numbered(graphs["plain"], Dataset(arrays, None))
