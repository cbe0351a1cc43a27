"""`torchtitan`: train, check, verify-parallelism, generate, trace, checkpoint and other verbs."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torchtitan.checkpoint import inspect
from torchtitan.checkpoint.weights import convert
from torchtitan.checks import load_job, remarks, smallest_world
from torchtitan.config import ConfigError, json_schema
from torchtitan.data import DATASETS, train_tokenizer
from torchtitan.device import pick
from torchtitan.flight_recorder import read_traces, report
from torchtitan.job import JobConfig
from torchtitan.legacy_recipes.migrate import migrate
from torchtitan.logging import configure, on_terminal
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.parallel import stages
from torchtitan.provenance import to_toml, versions
from torchtitan.tools.compare import FORMS, compare, compare_folders, foresee
from torchtitan.tools.compare import read as read_study
from torchtitan.tools.compare import summary as summary_of_study
from torchtitan.tools.evaluate import commands
from torchtitan.tools.evaluate.opening import import_modules
from torchtitan.tools.explain import commands as explain_commands
from torchtitan.tools.verify import verify
from torchtitan.tools.verify.resume import verify_resume
from torchtitan.tools.verify.resume_recipe import read_layout
from torchtitan.tools.watch import watch
from torchtitan.train import main as train
from torchtitan.train import problems_of_tokenizer, refuse, split_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` has it: job.imports may name modules there
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        return train(words[1:])
    parser = _parser()
    own, flags = _split(words)
    arguments, unknown = parser.parse_known_args(own)
    if arguments.verb not in WITH_RECIPE and (unknown or flags):
        parser.error(f"unrecognized arguments: {' '.join([*unknown, *flags])}")
    configure()
    try:
        status: int | None = arguments.verb(arguments, [*unknown, *flags])
    except ConfigError as error:
        return refuse(error)
    return status or 0


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the command itself, and the flags `--section.key` with what follows each."""
    own: list[str] = []
    flags: list[str] = []
    current = own
    for word in words:
        if word.startswith("--"):
            current = flags if "." in word.partition("=")[0] else own
        current.append(word)
    return own, flags


def check_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Validate a recipe without starting anything, and print it resolved."""
    if arguments.json_schema:
        print(json.dumps(json_schema(JobConfig), indent=1))
        return
    path, rest = split_recipe([*([arguments.recipe] if arguments.recipe else []), *flags])
    recipe = load_job(path, rest, arguments.world_size, arguments.device or pick().type)
    recipe.refuse(problems_of_tokenizer(recipe.config))
    job = recipe.config
    lines = [*recipe.notices, *remarks(job), *summary(job, arguments.world_size)]
    # In one piece, so that `| head` does not close the pipe in between.
    print("".join(f"# {line}\n" for line in lines) + to_toml(job), end="")


def summary(job: JobConfig, world_size: int | None) -> Iterator[str]:
    """What a recipe comes to: ranks, batch, model."""
    ranks = world_size or smallest_world(job)
    degrees, t = job.degrees(ranks), job.training
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees._asdict().items())
    hint = "" if world_size else "; --world-size N checks for N"
    yield f"valid on {ranks} rank{'s' * (ranks > 1)}: {layout}{hint}"
    sequences = job.global_batch(degrees)
    yield (
        f"{sequences:,} sequences in an optimizer step: {t.local_batch_size} at a time x "
        f"{job.accumulation(degrees)} accumulated x {job.data_ranks(degrees)} data-parallel"
    )
    tokens = sequences * t.seq_len
    yield f"{tokens:,} tokens in a step, {tokens * t.steps:,} in {t.steps:,} steps"
    spec = MODELS[job.model.name]
    args = job.model_args()
    if degrees.pp > 1:
        microbatches = job.parallelism.microbatches(t.local_batch_size)
        yield stages.describe(job.parallelism, args.n_layers, microbatches)
    parameters = count_parameters(build_empty(spec.build, args, t.seq_len)).total
    yield (
        f"{job.model.name} {job.model.flavor}: {parameters:,} parameters, "
        f"{spec.flops_per_token(args, t.seq_len):.3g} floating-point operations a token"
    )


def verify_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Train a few steps in a recipe's layout and on one rank, on the CPU, and compare them."""
    path, rest = split_recipe([*([arguments.recipe] if arguments.recipe else []), *flags])
    is_same = verify(
        path, rest, world_size=arguments.world_size, steps=arguments.steps, shrink=arguments.shrink
    )
    return 0 if is_same else 1


def verify_resume_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Kill a run on the CPU, resume it, in another layout too, and compare it with one unharmed."""
    path, rest = split_recipe([*([arguments.recipe] if arguments.recipe else []), *flags])
    then = {"dp_shard": arguments.then} if arguments.then else {}
    is_same = verify_resume(
        path,
        rest,
        world_size=arguments.world_size,
        steps=arguments.steps,
        shrink=arguments.shrink,
        then=read_layout(arguments.then_layout) if arguments.then_layout else then,
    )
    return 0 if is_same else 1


def migrate_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Write a recipe of TorchTitan v0.1 or v0.2 in this version's form."""
    text, notices = migrate(Path(arguments.recipe))
    for notice in notices:
        print(notice, file=sys.stderr)
    if arguments.output is None:
        print(text, end="")
        return
    if Path(arguments.output).exists():
        raise ConfigError(f"{arguments.output}: exists already; nothing was written")
    Path(arguments.output).write_text(text, encoding="utf-8")


def trace_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Say what became of each rank of a run, by the traces that they left."""
    print(*report(read_traces(Path(arguments.folder))), sep="\n")


def watch_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Show what runs are doing, drawn anew every few seconds, until Ctrl-C."""
    watch(arguments.runs, arguments.refresh, arguments.once)


def list_checkpoints_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """List checkpoints: step, layout, size, digest, and whether their files are there."""
    from rich.console import Console

    console = Console(width=None if on_terminal() else 200)
    console.print(inspect.table([p for folder in arguments.paths for p in inspect.find(folder)]))


def verify_checkpoints_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Read every byte of checkpoints, and say which are not what was saved."""
    damaged = 0
    for path in (p for folder in arguments.paths for p in inspect.find(folder)):
        problems = list(inspect.damage(path))
        damaged += bool(problems)
        print(*(problems or [f"{path}: what was saved, to the bit"]), sep="\n", flush=True)
    return 1 if damaged else 0


def diff_checkpoints_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Compare two checkpoints of any layouts; the exit status is 1 if they differ."""
    first, second = (inspect.find(path)[-1] for path in (arguments.first, arguments.second))
    found = inspect.difference(first, second)
    print("\n".join(found.lines()))
    return 1 if found else 0


def convert_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Write weights in another format: a checkpoint of ours, Hugging Face's, or Meta's."""
    import_modules(arguments.imports, "--imports")
    wishes = convert.Wishes(
        source_format=arguments.source_format,
        target_format=arguments.target_format,
        model=arguments.model,
        flavor=arguments.flavor,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
    )
    about = {"versions": versions()}
    convert.convert(arguments.source, arguments.destination, wishes, about)


def train_tokenizer_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Make a byte-level BPE tokenizer from the documents of a data set."""
    train_tokenizer(
        arguments.dataset,
        arguments.dataset_path,
        vocab_size=arguments.vocab_size,
        output=arguments.output,
        documents=arguments.documents,
        text_key=arguments.text_key,
        seed=arguments.seed,
    )


def compare_verb(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run recipes side by side under the same conditions, or compare runs that exist; a report."""
    paths: list[Path] = arguments.paths
    folders = [path for path in paths if path.is_dir()]
    if folders:
        if len(folders) < len(paths) or arguments.vary or flags:
            raise ConfigError(f"{folders[0]}: is a folder; runs are compared as they are")
        output = Path(arguments.output or "outputs/studies/of_runs")
        warmup = 5 if arguments.warmup_steps is None else arguments.warmup_steps
        report = compare_folders(folders, arguments.baseline, output, warmup)
    else:
        names = ("ranks", "baseline", "rounds", "warmup_steps", "steps", "seeds", "launcher")
        changes = {name: getattr(arguments, name) for name in (*names, "trace", "output")}
        study = read_study(paths, arguments.vary, flags, **changes)
        if arguments.check:
            print(*foresee(study), sep="\n")
            return 0
        try:
            output, report = study.output, compare(study)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on with what is left ({study.output})")
            return 130
    print(*summary_of_study(report), *(output / f"report.{form}" for form in FORMS), sep="\n")
    return 0 if report.ran and all(each.status != "failed" for each in report.variants) else 1


WITH_RECIPE = (check_verb, compare_verb, verify_verb, verify_resume_verb)
"""Verbs that take the flags of a recipe."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(
        verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, about: str | None
    ) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=about, description=about, allow_abbrev=False)

    verbs.add_parser("train", help="train from a recipe (train --help shows every setting)")

    verb = add(verbs, "check", check_verb.__doc__)
    verb.add_argument("recipe", nargs="?", help="the recipe; --section.key value may follow")
    verb.add_argument("--world-size", type=_count, help="ranks; absent: any number that fits")
    verb.add_argument("--device", choices=("cpu", "cuda"), help="absent: this machine's")
    verb.add_argument("--json-schema", action="store_true", help="print the schema for editors")
    verb.set_defaults(verb=check_verb)

    verb = add(verbs, "verify-parallelism", verify_verb.__doc__)
    verb.add_argument("recipe", nargs="?", help="the recipe; --section.key value may follow")
    verb.add_argument("--world-size", type=_count, help="ranks; absent: as few as show the layout")
    verb.add_argument("--steps", type=_count, help="optimizer steps; absent: 5")
    verb.add_argument("--shrink", action="store_true", help="make model, batches and layout small")
    verb.set_defaults(verb=verify_verb)

    verb = add(verbs, "verify-resume", verify_resume_verb.__doc__)
    verb.add_argument("recipe", nargs="?", help="the recipe; --section.key value may follow")
    verb.add_argument("--world-size", type=_count, help="ranks; absent: as few as show the layout")
    other = verb.add_mutually_exclusive_group()
    half = "absent: half of the ranks, or 2"
    other.add_argument("--then", type=_count, help=f"ranks to resume on, by FSDP; {half}")
    other.add_argument("--then-layout", metavar="AXES", help="or as in: tp=2,dp_shard=2")
    verb.add_argument(
        "--steps", type=_count, help="steps before it is killed, and after; absent: 3"
    )
    verb.add_argument("--shrink", action="store_true", help="make model, batches and layout small")
    verb.set_defaults(verb=verify_resume_verb)

    verb = add(verbs, "compare", compare_verb.__doc__)
    verb.add_argument(
        "paths", nargs="*", type=Path, help="a study, or recipes, or dump folders of runs"
    )
    verb.add_argument(
        "--vary", action="append", default=[], metavar="KEY=A,B", help="a variant for each value"
    )
    absent = "absent: as the study says, or"
    verb.add_argument("--ranks", type=_count, help=f"processes of a run; {absent} 1")
    verb.add_argument("--baseline", metavar="NAME", help=f"{absent} the first variant")
    verb.add_argument("--rounds", type=_count, help=f"runs of each variant; {absent} 3")
    verb.add_argument("--warmup-steps", type=_count, help=f"steps not measured; {absent} 5")
    verb.add_argument("--steps", type=_count, help=f"steps measured after those; {absent} 20")
    verb.add_argument(
        "--seeds", type=_count, nargs="+", help="further seeds, for the spread of chance"
    )
    verb.add_argument("--launcher", help="command that starts a run; {ranks} is filled in")
    verb.add_argument(
        "--no-trace", dest="trace", action="store_const", const=False, help="trace no step"
    )
    verb.add_argument("--output", help="folder of the runs and the report")
    verb.add_argument("--check", action="store_true", help="say what would run; start nothing")
    verb.set_defaults(verb=compare_verb)

    verb = add(verbs, "migrate", migrate_verb.__doc__)
    verb.add_argument("recipe", help="a recipe of TorchTitan v0.1 or v0.2")
    verb.add_argument("-o", "--output", help="file to write; absent: standard output")
    verb.set_defaults(verb=migrate_verb)

    verb = add(verbs, "trace", trace_verb.__doc__)
    verb.add_argument("folder", help="comm.save_traces_folder of the run: outputs/x/comm_traces")
    verb.set_defaults(verb=trace_verb)

    verb = add(verbs, "watch", watch_verb.__doc__)
    verb.add_argument("runs", nargs="+", type=Path, help="job.dump_folder of a run: outputs/x")
    verb.add_argument("--refresh", type=_seconds, default=2.0, metavar="SECONDS", help="absent: 2")
    verb.add_argument("--once", action="store_true", help="print what is, and end")
    verb.set_defaults(verb=watch_verb)

    commands.add_verbs(partial(add, verbs))
    explain_commands.add_verbs(partial(add, verbs))

    group = add(verbs, "checkpoint", "look at checkpoints")
    of_checkpoint = group.add_subparsers(required=True, metavar="VERB")
    for name, function in (("ls", list_checkpoints_verb), ("verify", verify_checkpoints_verb)):
        verb = add(of_checkpoint, name, function.__doc__)
        where = "checkpoints (step-N), folders of them, or dump folders of runs"
        verb.add_argument("paths", nargs="+", type=Path, help=where)
        verb.set_defaults(verb=function)
    verb = add(of_checkpoint, "diff", diff_checkpoints_verb.__doc__)
    for name in ("first", "second"):
        verb.add_argument(name, type=Path, help="a checkpoint; of a folder of them the newest")
    verb.set_defaults(verb=diff_checkpoints_verb)
    verb = add(of_checkpoint, "convert", convert_verb.__doc__)
    where = "folder of weights; of a folder of checkpoints, or of a run, the newest"
    verb.add_argument("source", type=Path, help=where)
    verb.add_argument("destination", type=Path, help="folder to make")
    kinds, dtypes = convert.FORMATS, convert.DTYPES
    verb.add_argument("--from", dest="source_format", choices=kinds, help="absent: by the files")
    verb.add_argument(
        "--to", dest="target_format", choices=kinds, help="absent: hf of ours, else ours"
    )
    verb.add_argument("--model", help="a key of MODELS; absent: as the source says")
    verb.add_argument("--flavor", help="a size of it; absent: as the source says")
    verb.add_argument("--dtype", choices=dtypes, help="of all weights; absent: each keeps its own")
    verb.add_argument("--max-shard-size", metavar="SIZE", help="of a file; absent: 5GB")
    verb.add_argument(
        "--imports", nargs="+", default=(), metavar="MODULE", help="modules that add to MODELS"
    )
    verb.set_defaults(verb=convert_verb)

    group = add(verbs, "tokenizer", "make tokenizers")
    verb = add(
        group.add_subparsers(required=True, metavar="VERB"), "train", train_tokenizer_verb.__doc__
    )
    known = ", ".join(DATASETS)
    verb.add_argument("--dataset", default="python_stdlib", help=f"{known}, or a path")
    verb.add_argument("--dataset-path", help="file or folder of a data set that has none")
    verb.add_argument("--text-key", default="text", help="column or key of the text")
    verb.add_argument("--documents", type=int, default=None, help="how many to read; absent: all")
    verb.add_argument("--vocab-size", type=int, default=2048, help="special tokens included")
    verb.add_argument("--seed", type=int, default=0, help="which documents, with --documents")
    verb.add_argument("--output", required=True, help="tokenizer.json to write")
    verb.set_defaults(verb=train_tokenizer_verb)
    return parser


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"got {word}; wanted an integer >= 1")
    return int(word)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"got {word}; wanted seconds, above 0 and at most 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
