"""Measure the loss of a model on held-out text, or run another evaluation."""

import json
from typing import Annotated

import torch
import typer

from torchtitan.config import ConfigError
from torchtitan.tools.evaluate.chosen_converters import converters_of_flags
from torchtitan.tools.evaluate.evaluation import EVALUATIONS, EvaluationRequest
from torchtitan.tools.evaluate.subject import ModelLocation
from torchtitan.tools.evaluate.subject_options import (
    BatchSize,
    ConvertVerb,
    Dtype,
    Format,
    NoConvert,
    Source,
    Tokenizer,
)
from torchtitan.tools.options import Count, Flavor, Imports, Model, Text, import_modules, verb

app = verb()


@app.command(cls=ConvertVerb, help=__doc__)
def evaluate(
    context: typer.Context,
    source: Source,
    tasks: Annotated[
        str, Text("NAME", f"Evaluation: {' or '.join(EVALUATIONS)} (default: loss).")
    ] = "loss",
    limit: Annotated[int | None, Count("Maximum number of documents (default: all).")] = None,
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
    dtype: Dtype = None,
    batch_size: BatchSize = 8,
    dataset: Annotated[
        str | None, Text("NAME", "Data set, or its path (default: that of the run's validation).")
    ] = None,
    dataset_path: Annotated[str | None, Text("PATH", "File or folder of the data set.")] = None,
) -> None:
    import_modules(imports or (), "--imports")
    convert = converters_of_flags(context.args, no_convert)
    if tasks not in EVALUATIONS:
        raise ConfigError(
            f"--tasks: got {tasks}; wanted {' or '.join(EVALUATIONS)}; for benchmarks, export the "
            f"weights (torchtitan checkpoint convert {source} FOLDER --to hf) and run "
            f"lm_eval --model hf --model_args pretrained=FOLDER --tasks {tasks}"
        )
    request = EvaluationRequest(
        ModelLocation(source, model, flavor, tokenizer, format, tuple(imports or ()), convert),
        dataset,
        dataset_path,
        limit,
        batch_size,
        getattr(torch, dtype) if dtype else None,
        length,
    )
    values, lines = EVALUATIONS[tasks](request)
    print(json.dumps({tasks: values}) if as_json else "\n".join(lines))
