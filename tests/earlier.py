"""What earlier states of the project wrote and accept, kept so that tests can hold it.

`python -m tests.earlier COMMIT CHECKOUT` adds a state: CHECKOUT is a clone at COMMIT. A file that
is already there is never written again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EARLIER = Path(__file__).parent / "data/earlier"
COMMITS = sorted(path.name for path in EARLIER.iterdir() if path.is_dir())
VERBS = (
    *("train", "check", "verify-parallelism", "verify-resume", "compare", "migrate"),
    *("plot", "profile", "trace", "generate", "evaluate", "tokenizer train"),
    *("checkpoint ls", "checkpoint diff", "checkpoint verify", "checkpoint convert"),
)


class Checkout:
    """A clone at some commit, whose commands are run in a folder."""

    def __init__(self, path):
        self.path = path.resolve()
        is_first = (path / "torchtitan/cli.py").is_file()
        self.verb = ["-m", "torchtitan.cli" if is_first else "torchtitan.tools.cli"]
        self.verbs = [verb for verb in VERBS if not (is_first and verb == "plot")]

    def run(self, folder, *words):
        """Run Python with these words in `folder`; return what it printed."""
        path = f"{self.path}:{folder}"
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}
        command = [sys.executable, *words]
        result = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        if result.returncode:
            sys.exit(f"{' '.join(command)}: status {result.returncode}")
        return result.stdout

    def options(self, folder):
        """Return the options of each verb and of the launcher."""
        texts = {verb: self.run(folder, *self.verb, *verb.split(), "--help") for verb in self.verbs}
        texts["launch"] = self.run(folder, "-m", "torchtitan.launch", "--help")
        return {verb: listed_options(text) for verb, text in texts.items()}


def main(commit, path):
    checkout, to = Checkout(Path(path)), EARLIER / commit

    def write(name, text):
        file = to / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for file in ("recipe.toml", "small_model.py", "text.txt"):
            shutil.copy(EARLIER / file, work)
        two = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "torchtitan.train"]
        checkout.run(work, *two, "--job.config_file=recipe.toml", "--job.dump_folder=run")
        for source, kept in {
            work / "run/checkpoint/step-3": to / "checkpoint/step-3",
            checkout.path / "train_configs": to / "train_configs",
        }.items():
            if not kept.exists():
                shutil.copytree(source, kept)
        for file in ("recipe.toml", "environment.json", "metrics.jsonl"):
            text = (work / "run" / file).read_text()
            write(f"run/{file}", text.replace(f"{checkout.path}/", ""))
        schema = json.loads(checkout.run(work, *checkout.verb, "check", "--json-schema"))
        write("settings.json", as_json(sorted(set(settings(schema, schema["$defs"])))))
        write("command_line.json", as_json(checkout.options(work)))
        variants = ["--vary", "optimizer.lr=1e-2,3e-2", "--rounds=1", "--warmup-steps=1"]
        alone = ["--ranks=1", "--steps=2", "--output=study"]
        checkout.run(work, *checkout.verb, "compare", "recipe.toml", *variants, *alone)
        report = json.loads((work / "study/report.json").read_text())
        write("report.json", as_json(sorted(set(fields(report)))))


def as_json(value):
    return json.dumps(value, indent=1) + "\n"


def settings(schema, classes, path=""):
    """Yield the keys of a recipe, those of every choice of a section included."""
    if name := schema.get("$ref"):
        schema = classes[name.rpartition("/")[2]]
    if "properties" in schema:
        for key, value in schema["properties"].items():
            yield from settings(value, classes, f"{path}.{key}" if path else key)
        return
    if schema.get("items"):
        inside = list(settings(schema["items"], classes, f"{path}.0"))
        yield from inside if inside != [f"{path}.0"] else [path]
        return
    choices = [part for form in ("anyOf", "oneOf") for part in schema.get(form, ())]
    found = [name for part in choices for name in settings(part, classes, path)]
    yield from found or [path]


def listed_options(text):
    """Return the options in a help text, without the settings of a recipe."""
    listed = re.findall(r"^[\s│*]*(--[a-z][\w-]*)(?![\w.-])", text, flags=re.MULTILINE)
    return sorted(set(listed))


def fields(value, path=""):
    """Yield dotted paths of the numbers and texts in a report."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from fields(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, f"{path}[]")
        if not value:
            yield f"{path}[]"
    else:
        yield path


if __name__ == "__main__":
    main(*sys.argv[1:])
