"""Score a model on tasks of the lm-evaluation-harness, or probe an encoder of images."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from torchtitan.config import ConfigError
from torchtitan.research.vit_mae.probe import PROBE, as_lines, run_probe
from torchtitan.tools.evaluate.harness import as_table, find_tasks, run_tasks
from torchtitan.tools.evaluate.opening import Place, open_subject
from torchtitan.tools.evaluate.options import (
    BatchSize,
    Dtype,
    Format,
    Source,
    TensorParallel,
    Tokenizer,
)
from torchtitan.tools.evaluate.ranks import chosen_dtype, on_ranks, warn_if_longer
from torchtitan.tools.options import Count, Flavor, Imports, Model, Text, Verb, verb

app = verb()


@app.command(cls=Verb, help=__doc__)
def evaluate(
    source: Source,
    tasks: Annotated[str, Text("A,B", f"names of tasks, or {PROBE}")],
    limit: Annotated[int | None, Count("documents of a task, or images; absent: all")] = None,
    num_fewshot: Annotated[
        int | None, Text("N", "examples before each; absent: as a task says")
    ] = None,
    include_path: Annotated[Path | None, Text("FOLDER", "tasks of your own")] = None,
    length: Annotated[int | None, Count("tokens of a sequence; absent: as in training")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the results as one object")] = False,
    format: Format = None,
    model: Model = None,
    flavor: Flavor = None,
    tokenizer: Tokenizer = None,
    imports: Imports = None,
    tensor_parallel: TensorParallel = 1,
    dtype: Dtype = None,
    batch_size: BatchSize = 8,
    dataset: Annotated[
        str | None, Text("NAME", "images of a probe; absent: as in training")
    ] = None,
    dataset_path: Annotated[str | None, Text("PATH", "where they are")] = None,
) -> None:
    names = tuple(name for name in tasks.split(",") if name)
    place = Place(source, model, flavor, tokenizer, format, tuple(imports or ()))
    if PROBE in names:
        if len(names) > 1:
            raise ConfigError(f"--tasks: got {tasks}; {PROBE} is run by itself")
        kind = getattr(torch, dtype or "float32")
        probed = run_probe(place, (dataset, dataset_path), limit, batch_size, kind)
        result = {PROBE: probed._asdict()}
        print(json.dumps(result) if as_json else "\n".join(as_lines(probed)))
        return
    found_tasks = find_tasks(names, include_path)
    subject = open_subject(place)
    length = length or subject.seq_len
    if length is None:
        raise ConfigError(f"{place.path}: it does not say how long sequences are; --length does")
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
