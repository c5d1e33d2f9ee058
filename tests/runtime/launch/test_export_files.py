"""What a job gives the swarm beside its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.capture.sources import About, LanguageModel
from fusion.runtime.job.errors import JobError
from fusion.runtime.launch.export_files import export_files


def test_a_setting_that_is_no_part_of_the_model_is_not_among_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path, login = tmp_path / "model" / "generation_config.json", tmp_path / "login.json"
    login.write_text('{"token": "secret"}')
    path.symlink_to(login)
    row = TensorType((2,), "float32")
    graph = Graph((Input("x", row),), (), (Node("y", "aten.neg", (Ref("x"),), (row,)),), (Ref("y"),))
    model = LanguageModel(about=About(), inference=graph, read=lambda variables: {}, config=(path,))
    with pytest.raises(JobError, match="is a link to"):
        export_files(model)
    path.unlink()
    path.write_text("{}")
    assert export_files(model)["generation_config.json"] == path
