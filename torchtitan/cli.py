"""The `torchtitan` command: train, check, migrate, tokenizer train."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan import dialect
from torchtitan.config import ConfigError, show
from torchtitan.data import DATASETS
from torchtitan.device import pick
from torchtitan.job import JobConfig, load_job, smallest_world
from torchtitan.logging import configure
from torchtitan.provenance import to_toml
from torchtitan.train import main as train
from torchtitan.train import refuse, split_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        return train(words[1:])
    arguments, rest = _parser().parse_known_args(words)
    if rest and arguments.verb is not check:
        return refuse(ConfigError(f"{rest[0]}: not an argument of this command"))
    configure()
    try:
        arguments.verb(arguments, rest)
    except ConfigError as error:
        return refuse(error)
    return 0


def check(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Validate a recipe without starting anything, and print it resolved."""
    if arguments.json_schema:
        print(json.dumps(JobConfig.model_json_schema(), indent=1))
        return
    words = [*([arguments.recipe] if arguments.recipe else []), *flags]
    path, rest = split_recipe(words)
    recipe = load_job(path, rest, arguments.world_size, arguments.device or pick().type)
    job = recipe.config
    for notice in recipe.notices:
        print(f"# {notice}")
    ranks = arguments.world_size or smallest_world(job)
    degrees = job.degrees(ranks)
    tokens = job.global_batch(degrees) * job.training.seq_len
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees._asdict().items())
    print(f"# valid on {ranks} rank{'s' * (ranks > 1)}: {layout}")
    print(f"# {job.global_batch(degrees)} sequences, {tokens:,} tokens in an optimizer step")
    print(to_toml(job), end="")


def migrate(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Write a recipe of TorchTitan v0.1 or v0.2 in this version's form."""
    text, notices = dialect.migrate(Path(arguments.recipe))
    for notice in notices:
        print(notice, file=sys.stderr)
    if arguments.output is None:
        print(text, end="")
        return
    if Path(arguments.output).exists():
        raise ConfigError(f"{arguments.output}: exists already; nothing was written")
    Path(arguments.output).write_text(text, encoding="utf-8")


def train_tokenizer(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Make a byte-level BPE tokenizer from the documents of a data set."""
    from torchtitan.data import train_tokenizer

    train_tokenizer(
        arguments.dataset,
        arguments.dataset_path,
        vocab_size=arguments.vocab_size,
        output=arguments.output,
        documents=arguments.documents,
        text_key=arguments.text_key,
        seed=arguments.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser("train", help="train from a recipe (train --help shows every setting)")

    verb = verbs.add_parser("check", help=check.__doc__, description=check.__doc__)
    verb.add_argument("recipe", nargs="?", help="the recipe; --section.key value may follow")
    verb.add_argument("--world-size", type=int, help="ranks; absent: any number that fits")
    verb.add_argument("--device", choices=("cpu", "cuda"), help="absent: this machine's")
    verb.add_argument("--json-schema", action="store_true", help="print the schema for editors")
    verb.set_defaults(verb=check)

    verb = verbs.add_parser("migrate", help=migrate.__doc__, description=migrate.__doc__)
    verb.add_argument("recipe", help="a recipe of TorchTitan v0.1 or v0.2")
    verb.add_argument("-o", "--output", help="file to write; absent: standard output")
    verb.set_defaults(verb=migrate)

    group = verbs.add_parser("tokenizer", help="make tokenizers").add_subparsers(
        required=True, metavar="VERB"
    )
    verb = group.add_parser("train", help=train_tokenizer.__doc__)
    known = ", ".join(DATASETS)
    verb.add_argument("--dataset", default="python_stdlib", help=f"{known}, or a path")
    verb.add_argument("--dataset-path", help="file or folder of a data set that has none")
    verb.add_argument("--text-key", default="text", help="column or key of the text")
    verb.add_argument("--documents", type=int, default=None, help="how many to read; absent: all")
    verb.add_argument("--vocab-size", type=int, default=2048, help="special tokens included")
    verb.add_argument("--seed", type=int, default=0, help="which documents, with --documents")
    verb.add_argument("--output", required=True, help="tokenizer.json to write")
    verb.set_defaults(verb=train_tokenizer)
    return parser


if __name__ == "__main__":
    sys.exit(main())
