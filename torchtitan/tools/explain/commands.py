"""The words of `torchtitan explain` and `torchtitan profile`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan.tools.explain.advice import advise
from torchtitan.tools.explain.facts import read_facts, read_rank_traces
from torchtitan.tools.explain.page import page, tell_traces
from torchtitan.tools.explain.request import NoAnswer, profile

PATIENCE = 300.0
"""Seconds that a run may take to answer: to the end of its step, and of the traced ones."""


class Adds(Protocol):
    """Adds a verb to the command line."""

    def __call__(self, name: str, about: str | None) -> argparse.ArgumentParser: ...


def explain_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Say what a run did, where its time went, and what to try."""
    facts = read_facts(arguments.run)
    advice = advise(facts)
    told: dict[str, Any] = dataclasses.asdict(facts) | {"folder": str(facts.folder)}
    del told["recipe"]  # it stands in recipe.toml
    told["slowest"] = [one._asdict() for one in facts.slowest]
    told["advice"] = [one._asdict() for one in advice]
    text = json.dumps(told, indent=1) if arguments.json else page(facts, advice)
    # In one piece, so that `| head` does not close the pipe in between.
    print(f"{text}\n", end="")


def profile_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Have a run that goes on write a trace of its next steps, and say what is in it."""
    try:
        folder = profile(arguments.run, arguments.steps, arguments.wait)
    except NoAnswer as failure:
        print(failure, file=sys.stderr)
        return 1
    print(*tell_traces(read_rank_traces(folder)), sep="\n")
    print("open them at https://ui.perfetto.dev")
    return 0


def add_verbs(add: Adds) -> None:
    """Add both to the command line."""
    where = "job.dump_folder of a run: outputs/x"
    verb = add("explain", explain_verb.__doc__)
    verb.add_argument("run", type=Path, help=where)
    verb.add_argument("--json", action="store_true", help="the numbers, as JSON")
    verb.set_defaults(verb=explain_verb)

    verb = add("profile", profile_verb.__doc__)
    verb.add_argument("run", type=Path, help=where)
    verb.add_argument("--steps", type=_count, default=1, help="how many to trace; absent: 1")
    verb.add_argument(
        "--wait", type=_count, default=PATIENCE, metavar="SECONDS", help="absent: 300"
    )
    verb.set_defaults(verb=profile_verb)


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"got {word}; wanted an integer >= 1")
    return int(word)
