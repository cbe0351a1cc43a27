"""Generate text from the weights of a run, a checkpoint, Hugging Face or Meta."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from torchtitan.config import ConfigError
from torchtitan.tools.evaluate.chosen_converters import converters_of_flags
from torchtitan.tools.evaluate.samples import SamplingRequest
from torchtitan.tools.evaluate.samples import generate as sample
from torchtitan.tools.evaluate.sampling import Sampling
from torchtitan.tools.evaluate.subject import ModelLocation, open_subject
from torchtitan.tools.evaluate.subject_options import (
    BatchSize,
    ConvertVerb,
    Dtype,
    Format,
    NoConvert,
    Source,
    Tokenizer,
)
from torchtitan.tools.options import (
    Count,
    Flavor,
    Imports,
    Model,
    Text,
    import_modules,
    number,
    verb,
)

TEMPERATURE = number("a number >= 0", lambda value: 0 <= value < float("inf"))
SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
app = verb()


@app.command(cls=ConvertVerb, help=__doc__)
def generate(
    context: typer.Context,
    source: Source,
    prompt: Annotated[list[str] | None, Text("TEXT", "Text to continue; may be repeated.")] = None,
    prompts_file: Annotated[Path | None, Text("FILE", "File with one prompt per line.")] = None,
    tokens: Annotated[int, Count("Maximum number of new tokens (default: 64).")] = 64,
    samples: Annotated[int, Count("Number of samples per prompt (default: 1).")] = 1,
    temperature: Annotated[
        float,
        Text(
            *("X", "Divisor of the logits; 0: always take the most likely token (default: 1)."),
            parser=TEMPERATURE,
        ),
    ] = 1.0,
    top_k: Annotated[
        int | None, Count("Sample from this number of most likely tokens (default: all).")
    ] = None,
    top_p: Annotated[
        float,
        Text(
            *("X", "Sample from the most likely tokens with this total probability (default: 1)."),
            parser=SHARE,
        ),
    ] = 1.0,
    seed: Annotated[int, Text("N", "Random seed (default: 0).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
    format: Format = None,
    model: Model = None,
    flavor: Flavor = None,
    tokenizer: Tokenizer = None,
    imports: Imports = None,
    no_convert: NoConvert = False,
    dtype: Dtype = None,
    batch_size: BatchSize = 8,
) -> None:
    import_modules(imports or (), "--imports")
    convert = converters_of_flags(context.args, no_convert)
    place = ModelLocation(source, model, flavor, tokenizer, format, tuple(imports or ()), convert)
    subject = open_subject(place)
    wanted = SamplingRequest(
        prompts=tuple(prompts(prompt or [], prompts_file)),
        dtype=getattr(torch, dtype) if dtype else subject.dtype,
        samples=samples,
        tokens=tokens,
        how=Sampling(temperature, top_k or 0, top_p),
        seed=seed,
        rows=batch_size,
        as_json=as_json,
    )
    sample(wanted, subject)


def prompts(given: list[str], path: Path | None) -> Iterator[str]:
    """The prompts of the command line, then of the file; without any, the empty one."""
    yield from given
    if path is None:
        if not given:
            yield ""
        return
    if not path.is_file():
        raise ConfigError(f"--prompts-file: got {path}; there is no such file")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts-file: got {path}; it is empty; write one prompt per line")
    yield from lines
