"""Score a model on tasks of the lm-evaluation-harness, or with another evaluation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from torchtitan.config import ConfigError
from torchtitan.tools.evaluate.chosen_converters import converters_of_flags
from torchtitan.tools.evaluate.evaluation import EVALUATIONS, EvaluationRequest
from torchtitan.tools.evaluate.harness import as_table, find_tasks, run_tasks
from torchtitan.tools.evaluate.model_ranks import chosen_dtype, on_ranks, warn_if_longer
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject
from torchtitan.tools.evaluate.subject_options import (
    BatchSize,
    ConvertVerb,
    Dtype,
    Format,
    NoConvert,
    Source,
    TensorParallel,
    Tokenizer,
)
from torchtitan.tools.options import Count, Flavor, Imports, Model, Text, import_modules, verb

app = verb()


@app.command(cls=ConvertVerb, help=__doc__)
def evaluate(
    context: typer.Context,
    source: Source,
    tasks: Annotated[str, Text("A,B", f"Names of tasks, or {' or '.join(EVALUATIONS)}.")],
    limit: Annotated[int | None, Count("Maximum number of documents (default: all).")] = None,
    num_fewshot: Annotated[
        int | None, Text("N", "Number of examples before each question (default: the task's).")
    ] = None,
    include_path: Annotated[Path | None, Text("FOLDER", "Folder of your own tasks.")] = None,
    length: Annotated[
        int | None, Count("Context length in tokens (default: as in training).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as a JSON object.")
    ] = False,
    format: Format = None,
    model: Model = None,
    flavor: Flavor = None,
    tokenizer: Tokenizer = None,
    imports: Imports = None,
    no_convert: NoConvert = False,
    tensor_parallel: TensorParallel = 1,
    dtype: Dtype = None,
    batch_size: BatchSize = 8,
    dataset: Annotated[
        str | None,
        Text("NAME", "Data set of an evaluation that reads one (default: as in training)."),
    ] = None,
    dataset_path: Annotated[str | None, Text("PATH", "File or folder of the data set.")] = None,
) -> None:
    names = tuple(name for name in tasks.split(",") if name)
    import_modules(imports or (), "--imports")
    convert = converters_of_flags(context.args, no_convert)
    place = ModelLocation(source, model, flavor, tokenizer, format, tuple(imports or ()), convert)
    for other in EVALUATIONS.keys() & names:
        if len(names) > 1:
            raise ConfigError(
                f"--tasks: got {tasks}; {other} cannot be combined with other tasks; run it "
                "separately"
            )
        if convert:
            raise ConfigError(f"--convert.0.name: {other} converts nothing; leave it out")
        kind = getattr(torch, dtype or "float32")
        request = EvaluationRequest(place, dataset, dataset_path, limit, batch_size, kind)
        values, lines = EVALUATIONS[other](request)
        print(json.dumps({other: values}) if as_json else "\n".join(lines))
        return
    found_tasks = find_tasks(names, include_path)
    subject = open_subject(place)
    place = replace(place, convert=subject.convert)
    length = length or subject.seq_len
    if length is None:
        raise ConfigError(f"{place.path}: its sequence length is unknown; set it with --length")
    warn_if_longer(subject, length)
    settings = {
        "tasks": list(names),
        "task_manager": found_tasks,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "log_samples": False,
    }
    asked = place, chosen_dtype(dtype, subject), length, batch_size, settings
    found = on_ranks(tensor_parallel, subject, run_tasks, *asked)[0]
    if isinstance(found, ConfigError):
        raise found
    print(json.dumps(found["results"], default=str) if as_json else as_table(found))
