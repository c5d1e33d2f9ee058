"""What a user's file gives as model and loss becomes two graphs that compute the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.python.python_model import PythonGraphs, PythonModel
from fusion.runtime.job.errors import CaptureError, JobError
from fusion.runtime.job.spec import PythonConfig
from fusion.runtime.planes.codegen import compile_graph

TWO = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)
    def forward(self, x, y, scale=1.0):
        h = torch.relu(self.norm(self.a(x) + self.b(y)))
        return {"scores": scale * self.head(h), "hidden": h}

def model(width=4):
    return Net(width)

def loss(made, labels, y):
    return {"class": F.cross_entropy(made["scores"], labels), "size": 0.1 * (made["hidden"].mean() - y.sum() / len(y) / len([0, 1])) ** 2}
"""
ARRAYS = {
    "x": torch.linspace(-1, 1, 12).reshape(4, 3),
    "y": torch.linspace(0, 1, 8).reshape(4, 2),
    "labels": torch.tensor([0, 1, 1, 0]),
    "other": torch.zeros(4),
}


def opened(folder: Path, text: str, loss: str | None = "loss", **arguments: int) -> PythonModel:
    path = folder / "model.py"
    path.write_text(text)
    return PythonModel(PythonConfig(path=path, loss=loss, arguments=arguments), list(ARRAYS), seed=3)


def made(
    folder: Path, text: str, loss: str | None = "loss", **arguments: int
) -> tuple[PythonModel, PythonGraphs]:
    model = opened(folder, text, loss, **arguments)
    return model, model.capture({name: ARRAYS[name][:2] for name in model.inputs})


def test_several_inputs_outputs_and_losses(tmp_path: Path) -> None:
    model, graphs = made(tmp_path, TWO, width=6)
    assert model.inputs == ("x", "y", "labels") and graphs.outputs == ("scores", "hidden")
    assert graphs.inference is not None and [i.name for i in graphs.inference.inputs] == ["x", "y"]
    values = variables_from_module(model.module)
    assert values["a.weight"].shape == (6, 3)

    def run(graph: str, training: bool) -> tuple[torch.Tensor, ...]:
        program = compile_graph(getattr(graphs, graph), torch.device("cpu"), training=training)
        given = [values[name].clone() for name in program.variables]
        return program.run([ARRAYS[name] for name in program.inputs], given, None)

    model.module.eval()
    wanted = model.module(ARRAYS["x"], ARRAYS["y"])
    for found, right in zip(run("inference", False), wanted.values(), strict=True):
        torch.testing.assert_close(found, right)
    model.module.train()
    wanted = model.module(ARRAYS["x"], ARRAYS["y"])
    total = torch.nn.functional.cross_entropy(wanted["scores"], ARRAYS["labels"])
    total = total + 0.1 * (wanted["hidden"].mean() - ARRAYS["y"].mean()) ** 2
    torch.testing.assert_close(run("training", True)[0], total)


def test_the_seed_decides_the_weights_and_draws_nothing_of_ours(tmp_path: Path) -> None:
    torch.manual_seed(9)
    before = torch.random.get_rng_state()
    first, _ = made(tmp_path, TWO)
    assert torch.equal(before, torch.random.get_rng_state())
    second = opened(tmp_path, TWO)
    assert torch.equal(first.module.a.weight, second.module.a.weight)  # type: ignore[union-attr,arg-type]


def test_a_forward_that_gives_the_loss_itself(tmp_path: Path) -> None:
    text = "from torch import nn\nclass N(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    text += "        self.l = nn.Linear(3, 1)\n    def forward(self, x):\n        return (self.l(x) - 1).square().mean(), self.l(x).abs().mean()\n"
    _, graphs = made(tmp_path, text + "model = N\n", loss=None)
    assert graphs.inference is None and graphs.training.types[graphs.training.outputs[0]].shape == ()


def test_a_loss_that_is_a_module_has_its_buffers(tmp_path: Path) -> None:
    text = (
        TWO[: TWO.index("def loss")]
        + """
class Loss(nn.CrossEntropyLoss):
    def forward(self, made, labels):
        return super().forward(made["scores"], labels)

loss = Loss(weight=torch.arange(1.0, 101.0))
"""
    )
    model, graphs = made(tmp_path, text.replace("nn.Linear(width, 2)", "nn.Linear(width, 100)"))
    assert model.inputs == ("x", "y", "labels")
    program = compile_graph(graphs.training, torch.device("cpu"), training=True)
    variables = {each.name: each for each in graphs.training.variables}
    values = graphs.read([variables[name] for name in program.variables])
    given = [values[name].clone() for name in program.variables]
    found = program.run([ARRAYS[name] for name in program.inputs], given, None)[0]
    scores = model.module(ARRAYS["x"], ARRAYS["y"])["scores"]
    weight = torch.arange(1.0, 101.0)
    torch.testing.assert_close(
        found, torch.nn.functional.cross_entropy(scores, ARRAYS["labels"], weight=weight)
    )


@pytest.mark.parametrize(
    ("parameters", "inputs"),
    [
        ("made, labels, other=None, y=0", ("labels", "other", "y")),
        ("made, labels, smoothing=0.1, y=0", ("labels", "y")),
        ("made, *, y, labels", ("y", "labels")),
        ("made, labels, *, smoothing=0.1, y=0", ("labels", "y")),
        ("made, labels, /, *, y=0", ("labels", "y")),
        ("made, labels, smoothing=0.1, y=0, /", ("labels",)),
        ("y, labels", ("labels",)),
    ],
)
def test_a_loss_gets_every_array_that_it_names(
    tmp_path: Path, parameters: str, inputs: tuple[str, ...]
) -> None:
    net = TWO.replace("torch.relu(self.norm(self.a(x) + self.b(y)))", "self.a(x) + self.b(y)")
    body = net[: net.index("def loss")] + f"def loss({parameters}):\n    "
    body += f"scores = {parameters.split(',')[0]}['scores']\n    "
    body += "total = F.cross_entropy(scores, labels)\n    "
    body += "return total + y.mean()\n" if "y" in inputs else "return total\n"
    model, graphs = made(tmp_path, body)
    assert model._loss_inputs == inputs
    read = {ref.name for node in graphs.training.nodes for ref in node.refs()}
    assert {name for name in inputs if name != "other"} <= read


def test_forward_gets_arrays_that_it_takes_by_name_alone(tmp_path: Path) -> None:
    model, _ = made(
        tmp_path, TWO.replace("def forward(self, x, y, scale=1.0)", "def forward(self, x, *, scale=1.0, y)")
    )
    assert model.inputs == ("x", "y", "labels")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("return Net(width)", "return 3", "model must return an nn.Module, not int"),
        ("def loss(made, labels, y)", "def loss(made, label)", "loss takes 'label'; the data has labels, other, x, y"),
        ("def forward(self, x, y,", "def forward(self, image, y,", "forward of Net takes 'image'; the data has"),
        ("def loss(made, labels, y)", "def loss(made, labels, y, *, weight)", "loss takes 'weight'; the data has labels"),
        ("def loss(made, labels, y)", "def loss()", "loss must take what forward returned as its first argument"),
        ('{"class": F.cross_entropy(made["scores"], labels)', '{"class": F.cross_entropy(made["scores"], labels, reduction="none")',
         "must return one number to train on, not float32[batch]: take its mean"),
        ('F.cross_entropy(made["scores"], labels),', 'F.cross_entropy(made["scores"], labels).detach() if y is not None else 0}\n    _ = {',
         "model.py: loss must return a number with a gradient: no trainable parameter has a part in it"),
        ('return {"scores": scale * self.head(h), "hidden": h}', 'return {"scores": scale * self.head(h), "hidden": h, "size": 3}',
         "forward must return a tensor, or several in a dict or tuple, not a dict in which size is of int"),
        ("h = torch.relu(", "h = torch.relu(nothing + ", "model.py:13: NameError: name 'nothing' is not defined"),
        ("scale * self.head(h)", "self.head(x)", "model.py:14"),
        ("self.head = nn.Linear(width, 2)", "self.head = nn.Linear(width, 'two')", "model.py:11: TypeError"),
        ('return {"class"', 'return "nothing" or {"class"', "a loss is a tensor, or several"),
        ("nn.BatchNorm1d(width)", "nn.BatchNorm1d(width, momentum=None)", "an average that counts the batches so far: give it a momentum"),
        ("self.head = nn.Linear(width, 2)", "self.head = nn.Linear(width, 2, device='meta')",
         'model.py: parameter head.weight has no values: it is on device "meta"'),
        ("self.head = nn.Linear(width, 2)", "self.head = nn.Linear(width, 2)\n        self.register_buffer('z', torch.ones(2, dtype=torch.complex64))",
         "int8, uint8, bool: make it of real numbers, torch.view_as_real(...)"),
        ("return Net(width)", "return Net(width).requires_grad_(False)", "model.py: no parameter is trainable"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_work_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in TWO
    with pytest.raises(JobError) as error:
        made(tmp_path, TWO.replace(old, new))
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "self.head = nn.Linear(width, 2)",
            "self.head = nn.Linear(width, 2).double()",
            r"aten\.linear: dtypes float32, float64, float64 differ, at .*model\.py:14$",
        ),
        (
            'made["scores"], labels)',
            'made["scores"], labels.int())',
            r"target int32\[batch\] does not fit scores float32\[batch, 2\], at .*model\.py:20$",
        ),
    ],
)
def test_dtypes_that_do_not_go_together_are_refused_where_they_meet(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    """As torch does, but not with the fake tensors of a capture."""
    assert old in TWO
    with pytest.raises(CaptureError, match=says):
        made(tmp_path, TWO.replace(old, new))


def test_torch_writes_nothing_beside_that_line(tmp_path: Path) -> None:
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(CaptureError, match=r"model\.py:14: a and b must have same reduction dim"):
            made(tmp_path, TWO.replace("scale * self.head(h)", "self.head(x)"))
    finally:
        log.removeHandler(handler)
    assert not heard
