"""Explain what a run did, where its time went, and what to try."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from torchtitan.tools.explain.advice import advise
from torchtitan.tools.explain.facts import read_facts
from torchtitan.tools.explain.page import page
from torchtitan.tools.explain.predicted import predict
from torchtitan.tools.history import RunHistory
from torchtitan.tools.options import Run, Verb, verb

app = verb()


@app.command(cls=Verb, help=__doc__)
def explain(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    history = RunHistory.open(run)
    facts = read_facts(history)
    advice, prediction = advise(facts), predict(history, facts)
    found: dict[str, Any] = dataclasses.asdict(facts) | {"folder": str(facts.folder)}
    del found["recipe"]  # it is in recipe.toml
    found["slowest"] = [one._asdict() for one in facts.slowest]
    rows = [each._asdict() for each in prediction.rows]
    found["prediction"] = dataclasses.asdict(prediction) | {"rows": rows}
    found["advice"] = [one._asdict() | {"keys": one.keys} for one in advice]
    text = json.dumps(found, indent=1) if as_json else page(facts, advice, prediction)
    # In one piece, so that `| head` does not close the pipe in between.
    print(f"{text}\n", end="")
