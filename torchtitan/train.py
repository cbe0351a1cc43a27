"""Entry point of training: `python -m torchtitan.train --job.config_file recipe.toml`.

Started by itself it is one process; started by torchrun it is one of several. Exit status: 0 when
nothing was lost (also after Ctrl-C or SIGTERM), 2 when the recipe is wrong, 1 for anything else.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from torchtitan.build import build, open_tokenizer
from torchtitan.checkpoint import Start, choose_start
from torchtitan.checks import load_job, problems_of_machine, remarks
from torchtitan.config import ConfigError, Problem, Recipe, help_text
from torchtitan.data import Tokenizer, open_source, unigram_loss
from torchtitan.device import pick
from torchtitan.flight import Recorder
from torchtitan.job import SAME_RUN, JobConfig
from torchtitan.logging import configure, logger
from torchtitan.parallel import Launch, open_world
from torchtitan.provenance import to_toml, write_beside
from torchtitan.trainer import Trainer, TrainingDiverged

USAGE = """usage: torchtitan train RECIPE.toml [--section.key value ...]
       python -m torchtitan.train --job.config_file RECIPE.toml [--section.key value ...]

Flags win over the recipe. Booleans: --section.key, --no-section.key, or --section.key false;
lists: --section.key a b, or a,b; what may be absent: --section.key none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(USAGE, help_text(JobConfig), sep="\n")
        return 0
    launch = Launch.read()
    try:
        device = pick(launch.local_rank)
        recipe = read(words, launch.size, device.type)
        job = recipe.config
        configure(launch.rank, launch.size, color=not job.metrics.disable_color_printing)
        start = choose(job) if launch.rank == 0 else None
    except ConfigError as error:
        # Every rank finds the same mistakes; one of them tells.
        return refuse(error) if launch.rank == 0 else 2
    if launch.rank == 0:
        tell(recipe)

    folder = Path(job.job.dump_folder).expanduser()
    told = (ConfigError, TrainingDiverged)
    recorder = Recorder(job.comm, folder, launch.rank, launch.size, device.type, shared=told)
    try:
        with open_world(job.degrees(launch.size), job.comm, device) as world, recorder:
            start = world.share(start)
            run = build(job, world)
            with closing(run.data):
                if world.rank == 0:
                    write_beside(folder, job, world.size, device)
                    report_unigram_loss(job, run.tokenizer)
                Trainer(run, recorder.step).train(start)
    except ConfigError as error:
        return refuse(error)
    except TrainingDiverged as error:
        logger.error("%s", error)
        return 1
    return 0


def read(words: Sequence[str], ranks: int, device_type: str) -> Recipe[JobConfig]:
    """Read and check the recipe for `ranks` ranks of this machine's kind of device.

    Raises:
        ConfigError: with every mistake found.
    """
    path, flags = split_recipe(words)
    recipe = load_job(path, flags, ranks, device_type)
    recipe.refuse(problems_of_machine(recipe.config, device_type))
    recipe.refuse(problems_of_tokenizer(recipe.config))
    return recipe


def problems_of_tokenizer(job: JobConfig) -> Iterator[Problem]:
    """What only reading the tokenizer tells."""
    try:
        open_tokenizer(job)
    except ConfigError as error:
        yield Problem("model.tokenizer_path", str(error))


def choose(job: JobConfig) -> Start:
    """What the run starts from; one rank decides, before any of them writes."""
    folder = Path(job.job.dump_folder).expanduser()
    return choose_start(job.checkpoint, folder, job.flat(), SAME_RUN)


def split_recipe(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe's path, given first or as `--job.config_file`, and the other words."""
    paths: list[str] = []
    rest: list[str] = []
    waiting = list(words)
    if waiting and not waiting[0].startswith("--"):
        paths.append(waiting.pop(0))
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if name not in ("--job.config_file", "--job.config-file"):
            rest.append(name + equals + value)
        elif equals or (waiting and not waiting[0].startswith("--")):
            paths.append(value if equals else waiting.pop(0))
        else:
            raise ConfigError(f"{name}: job.config_file: got no value; wanted a recipe")
    if len(paths) > 1:
        got = " and ".join(paths)
        raise ConfigError(f"--job.config_file: job.config_file: got {got}; wanted one recipe")
    return paths[0] if paths else None, rest


def refuse(error: ConfigError) -> int:
    """Print what is wrong with the recipe; returns the exit status."""
    print(error, file=sys.stderr, flush=True)
    return 2


def tell(recipe: Recipe[JobConfig]) -> None:
    """Say what was read otherwise than it was written, and the recipe itself if asked."""
    for notice in (*recipe.notices, *remarks(recipe.config)):
        logger.info("%s", notice)
    if recipe.config.job.print_config:
        logger.info("the resolved recipe:\n%s", to_toml(recipe.config))


def report_unigram_loss(job: JobConfig, tokenizer: Tokenizer) -> None:
    """Log the loss that needs no model, once, for the eye to compare with."""
    if job.data.report_unigram_loss:
        loss = unigram_loss(open_source(job.data, tokenizer, seed=job.debug.seed), tokenizer)
        logger.info("reference: a unigram model of this text has loss %.3f", loss)


if __name__ == "__main__":
    sys.exit(main())
