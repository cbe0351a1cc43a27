"""The stages of the real run, each done once: its numbers are a file in results/real_run.

    python -m benchmarks.real_run.prepare outputs/real_run
    python -m benchmarks.real_run.run           # all stages; or name some: sizes rates main ...

With --large, those of the recipe for a GPU. Started again, it continues with what is not done.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli
import torch

from torchtitan.build import build
from torchtitan.checks import load_job
from torchtitan.parallel import open_world

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/real_run")
LAST = 20
"""Steps at the end of a run whose mean is its loss."""
RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (1e-3, 3e-3, 1e-2)}
SIZES = {"smaller": ("--model.dim=48", "--model.n_layers=4"), "chosen": ()}
PROMPTS = ("def test_", "The kernel ", "static int ")
SEEDS = (0, 1, 2)
PAUSES = ("validation_s", "checkpoint_s")
RANKS = [] if torch.cuda.is_available() else ["--processes=2"]  # of one thread each
SAVED = 75  # the status of a run that a signal has ended
BEGINNING = 600
"""Characters of a held-out document that both we and transformers score, in one window."""


def command(*words: object, json_out: bool = False) -> Any:
    """Run a command of torchtitan; its output, or the JSON in it."""
    line = [sys.executable, "-m", "torchtitan", *map(str, words), *["--json"] * json_out]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout) if json_out else done.stdout


def rows(name: str) -> list[dict[str, Any]]:
    """Return the metrics of a run by step; of a step that was repeated, the last ones."""
    path = WORK / "runs" / name / "metrics.jsonl"
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # the end of a run that was killed
            row = json.loads(line)
            if "event" not in row:
                found[row["step"], "validation_loss" in row] = row
    return [found[key] for key in sorted(found)]


def curve(name: str) -> dict[str, Any]:
    """Return the losses, held-out losses, speed and memory of a run."""
    steps = [row for row in rows(name) if "loss" in row]
    held = [row for row in rows(name) if "validation_loss" in row]
    losses = [row["loss"] for row in steps]
    return {
        "losses": losses,
        "held_out": [[row["step"], row["validation_loss"]] for row in held],
        "bits_per_byte": [[row["step"], row["validation_bits_per_byte"]] for row in held],
        "tokens": (tokens := steps[-1]["tokens"]),
        "tokens_per_second": tokens / len(steps) / statistics.median(r["step_time"] for r in steps),
        "times": [[row["time"], row["step_time"]] for row in steps],
        "pauses": [[row["step"], *map(row.get, PAUSES)] for row in steps if PAUSES[0] in row],
        "seconds": sum(row["step_time"] for row in steps),
        "memory_gib": max(row["memory_gib"] for row in steps),
        "end": statistics.fmean(losses[-LAST:]),
    }


@dataclass
class Driver:
    """Runs stages; one that is out of time is left, to be continued by the next call."""

    recipe: Path
    results: Path
    steps: int
    until: float
    """When it is out of time, on the monotonic clock."""

    def train(self, name: str, *flags: str, until: Callable[[], int] | None = None) -> None:
        """Train in the folder `name`, to the end or until a signal is to be sent."""
        folder = f"--job.dump_folder={WORK / 'runs' / name}"
        line = [sys.executable, "-m", "torchtitan", "train", self.recipe, folder, *RANKS, *flags]
        sent, is_late = 0, False
        log = (WORK / f"{name}.log").open("a")
        with subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True) as process:
            while process.poll() is None:
                is_late = time.monotonic() > self.until
                if not sent and (sent := is_late * signal.SIGTERM or (until() if until else 0)):
                    os.kill(process.pid, sent)
                time.sleep(0.005)
        if process.returncode not in {0, sent and SAVED, -sent}:
            sys.exit(f"{name} failed: see {log.name}")
        if is_late:
            sys.exit(f"{name} is out of time; the same command continues")

    def short(self, part: int) -> tuple[str, ...]:
        """Flags of a run that is a part of the length, without saves and validation."""
        steps = max(self.steps // part, 4)
        warm = f"--lr_scheduler.warmup_steps={steps // 10}"
        return f"--training.steps={steps}", warm, "--no-validation.enable", "--no-checkpoint.enable"

    def best(self, name: str) -> tuple[str, str]:
        ends = json.loads((self.results / "rates.json").read_text())[name]
        return f"--optimizer.name={name}", f"--optimizer.lr={min(ends, key=ends.get)}"

    def tokens(self) -> Any:
        """Tokenizer, tokens, and this machine's speed for plans."""
        made = WORK / "tokenizer.json"
        if not made.exists():
            text = ("--dataset", WORK / "text/train", "--vocab-size", 32000)
            command("tokenizer", "train", *text, "--output", made)
        counts = {}
        for source in ("docs", "c", "python"):
            text = ("--dataset", WORK / f"text/train/{source}.jsonl", "--tokenizer", made)
            command("data", "tokenize", *text, "--output", WORK / f"tokens/{source}")
            index = json.loads((WORK / f"tokens/{source}/index.json").read_text())
            counts[source] = index["tokens"]
        command("plan", self.recipe, "--calibrate", "--output", WORK / "hardware.toml")
        return {"text": json.loads((WORK / "text.json").read_text()), "tokens": counts}

    def sizes(self) -> Any:
        """Two sizes for a few steps, and the plan of each."""
        found = {}
        for name, flags in SIZES.items():
            self.train(f"size_{name}", *self.short(20), *flags)
            on = f"--hardware={WORK / 'hardware.toml'}"
            plan = command("plan", self.recipe, *flags, on, json_out=True)
            found[name] = curve(f"size_{name}") | {"plan": plan}
        return found

    def rates(self) -> Any:
        """The loss of a tenth of the run, by optimizer and learning rate."""
        found: dict[str, dict[str, float]] = {}
        for name, rates in RATES.items():
            for rate in rates:
                run = f"rate_{name}_{rate}"
                flags = (f"--optimizer.name={name}", f"--optimizer.lr={rate}")
                self.train(run, *self.short(10), *flags)
                found.setdefault(name, {})[str(rate)] = curve(run)["end"]
        return found

    def twin(self) -> Any:
        self.train("twin", *self.best("Muon"))
        return curve("twin")

    def adamw(self) -> Any:
        self.train("adamw", *self.best("AdamW"))
        return curve("adamw")

    def main(self) -> Any:
        """The run: on other layouts for a while, and two `kill -9` within saves."""
        saves, path = WORK / "runs/main/checkpoint", WORK / "marks.json"
        quarter, some = self.steps // 4, self.steps // 60 or 2

        def saved(step: int) -> Callable[[], int]:
            return lambda: signal.SIGTERM * (saves / f"step-{step}").exists()

        late = saves / f"step-{3 * quarter}.saving"
        end = ["pkill", "-KILL", "-f", f"dump_folder={WORK / 'runs/main'}"]
        often = f"--checkpoint.interval={some}"
        split = ["--processes=4", "--parallelism.tensor_parallel_degree=2", often]
        phases = (
            ([], saved(quarter), "FSDP 2 x TP 2"),
            (split, saved(quarter + some), "one rank"),
            (["--processes=1", often], saved(quarter + 2 * some), "FSDP 2"),
            ([], lambda: signal.SIGKILL * any(saves.glob("*.saving")), "kill -9 of the launcher"),
            ([], lambda: late.exists() and 9 * (not subprocess.call(end)), "kill -9 of everything"),
            ([], None, ""),
        )
        phases = phases if RANKS else phases[-3:]  # one GPU has no other layout
        marks = json.loads(path.read_text()) if path.exists() else []
        for flags, until, what in phases[len(marks) :]:
            self.train("main", *self.best("Muon"), *flags, until=until)
            marks.append([max(row["step"] for row in rows("main")), what])
            path.write_text(json.dumps(marks))
        return curve("main") | {"marks": marks[:-1]}

    def by_hand(self) -> Any:
        """The plain loop and the trainer with AdamW, from three seeds each."""
        program = [sys.executable, "-m", "benchmarks.real_run.by_hand"]
        program += [str(WORK / "settings.json"), str(WORK / "batches.npy")]
        found: dict[str, Any] = {"ours": [], "by hand": []}
        for seed in SEEDS:
            flags = [*self.best("AdamW"), *self.short(20), f"--debug.seed={seed}"]
            self.train(f"seed_{seed}", "--processes=1", *flags)
            s = self.write_batches(flags) | {"seed": seed}
            s["rates"] = [row["lr"] for row in rows(f"seed_{seed}") if "loss" in row]
            (WORK / "settings.json").write_text(json.dumps(s, default=str))
            hand = json.loads(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)
            speed = s["seq_len"] * s["global_batch_size"] / statistics.median(hand["seconds"])
            found["ours"].append([curve(f"seed_{seed}")[x] for x in ("end", "tokens_per_second")])
            found["by hand"].append([statistics.fmean(hand["losses"][-LAST:]), speed])
        return found

    def write_batches(self, flags: Sequence[str]) -> dict[str, Any]:
        """Write the batches of a run, whose order follows from its seed; return its settings."""
        flags = [*flags, f"--job.dump_folder={WORK / 'runs/batches'}"]
        job = load_job(self.recipe, flags, 1, "cuda" if torch.cuda.is_available() else "cpu").config
        with open_world(job.degrees(1), job.comm) as world:
            run = build(job, world)
            with closing(run.batches):
                micro = [next(run.batches)[0] for _ in range(job.training.steps)]
        parts = [[np.c_[b.tokens.cpu(), b.targets.cpu()[:, -1:]] for b in step] for step in micro]
        np.save(WORK / "batches.npy", np.stack([np.concatenate(step) for step in parts]))
        settings = vars(job.training) | vars(job.model_args()) | vars(job.optimizer)
        return settings | {"accumulated": len(micro[0])}

    def after(self) -> Any:
        """Samples, the export and its held-out loss, and the ledger."""
        run, exported, short = WORK / "runs/main", WORK / "exported", WORK / "beginnings.jsonl"
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        samples = {}
        for step in (self.steps * part // 4 for part in (1, 2, 3, 4)):
            words = ("generate", run / f"checkpoint/step-{step}", *prompts, "--tokens", 40)
            samples[step] = [json.loads(x) for x in command(*words, "--json").splitlines()]
        if not exported.exists():
            command("checkpoint", "convert", run, exported, "--to", "hf")
        lines = (WORK / "text/held_out/docs.jsonl").read_text().splitlines()[:50]
        texts = [json.loads(line)["text"][:BEGINNING] for line in lines]
        short.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return {
            "samples": samples,
            "ours": command("evaluate", run, "--dataset", short, json_out=True),
            "transformers": transformers_loss(exported, texts),
            "ledger": command("data", "ledger", run, "--verify", json_out=True),
        }


@torch.no_grad()
def transformers_loss(folder: Path, texts: Iterable[str]) -> float:
    """Nats a token that transformers gives the texts, each between BOS and EOS."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        total += float(model(ids, labels=ids).loss) * (ids.numel() - 1)
        count += ids.numel() - 1
    return total / count


REHEARSAL = """extends = "{recipe}"
training = {{ steps = {steps}, seq_len = 64, local_batch_size = 1, global_batch_size = 4 }}
checkpoint.interval = {part}
validation.freq = {part}
lr_scheduler.warmup_steps = 1
"""
STAGES = ("tokens", "sizes", "rates", "twin", "main", "adamw", "by_hand", "after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], help="Default: all.")
    parser.add_argument("--large", action="store_true", help="The recipe for a GPU.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Stop after them.")
    parser.add_argument("--steps", type=int, help="Fewer steps of few tokens, for a rehearsal.")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results/real_run")
    chosen = parser.parse_args()
    recipe = HERE / ("large.toml" if chosen.large else "recipe.toml")
    if chosen.steps:
        words = {"recipe": recipe, "steps": chosen.steps, "part": chosen.steps // 4}
        recipe = WORK / "rehearsal.toml"
        recipe.write_text(REHEARSAL.format(**words))
    total = chosen.steps or tomli.loads(recipe.read_text())["training"]["steps"]
    driver = Driver(recipe, chosen.results, total, time.monotonic() + 60 * chosen.minutes)
    chosen.results.mkdir(parents=True, exist_ok=True)
    for stage in chosen.stages or STAGES:
        if not (target := chosen.results / f"{stage}.json").exists():
            begin = time.time()
            target.write_text(json.dumps(getattr(driver, stage)(), indent=1) + "\n")
            print(f"{stage}: {(time.time() - begin) / 60:.1f} minutes", flush=True)
