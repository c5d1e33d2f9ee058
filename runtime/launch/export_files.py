"""The files of a job beside its weights, so that the directory that `export` writes can be served."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.job.model_files import ABOUT_FILE, GRAPH_FILE, check_own, is_exported
from fusion.runtime.launch.weights import contiguous


def export_files(model: sources.LanguageModel) -> dict[str, bytes | Path]:
    """By file name: the graph, the configuration, the chat template and the constants that `fusion.runtime.capture.sources` reads.
    JobError for a configuration that is a link out of the model."""
    for path in model.config:
        check_own(path, path.parent)
    files: dict[str, bytes | Path] = {**{path.name: path for path in model.config}, **model.chat}
    return {**files, **graph_files(model.inference, model.about, model.read)}


def graph_files(inference: Graph, about: sources.About, read: sources.Read) -> dict[str, bytes | Path]:
    """Of these the graph, its description, and its constants."""
    files: dict[str, bytes | Path] = {
        GRAPH_FILE: serialise.encode(clean(inference)),
        ABOUT_FILE: about.to_json(),
    }
    constants = [v for v in inference.variables if not is_exported(v.name)]
    if constants:
        files[sources.CONSTANTS_FILE] = save(contiguous(read(constants)))
    return files
