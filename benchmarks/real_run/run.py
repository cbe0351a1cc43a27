"""The stages of the real run, each done once: its numbers are a file in results/real_run.

    python -m benchmarks.real_run.prepare outputs/real_run
    python -m benchmarks.real_run.run           # all stages; or name some: sizes rates main ...

With --large, those of the recipe for a GPU. Started again, it continues with what is not done.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = Path("outputs/real_run")
LAST = 20
"""Steps at the end of a run whose mean is its loss."""
RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (1e-3, 3e-3, 1e-2)}
SIZES = {"smaller": ("--model.dim=48", "--model.n_layers=4"), "chosen": ()}
PROMPTS = ("def test_", "The kernel ", "static int ")
SEEDS = (0, 1, 2)
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
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the end of a run that was killed
                row = json.loads(line)
                found[row.get("step", 0), "validation_loss" in row] = row
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
        "tokens": steps[-1]["tokens"],
        "tokens_per_second": statistics.median(row["tps"] for row in steps),
        "mfu": [row["mfu"] for row in steps],
        "seconds": sum(row["step_time"] for row in steps),
        "memory_gib": max(row["memory_gib"] for row in steps),
        "end": statistics.fmean(losses[-LAST:]),
    }


class Driver:
    def __init__(self, recipe: Path, results: Path, steps: int) -> None:
        self.recipe, self.results, self.steps = recipe, results, steps

    def train(self, name: str, *flags: str, until: Callable[[], int] | None = None) -> None:
        """Train in the folder `name`, to the end or until a signal is to be sent."""
        folder = f"--job.dump_folder={WORK / 'runs' / name}"
        line = [sys.executable, "-m", "torchtitan", "train", str(self.recipe), folder, *flags]
        log = (WORK / f"{name}.log").open("a")
        with subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True) as process:
            sent = 0
            while process.poll() is None:
                if until and not sent and (sent := until()):
                    os.killpg(process.pid, sent)
                time.sleep(0.02)
        if process.returncode and sent != signal.SIGKILL:
            sys.exit(f"{name} failed: see {log.name}")

    def short(self, part: int) -> tuple[str, ...]:
        """Flags of a run that is a part of the length, without saves and validation."""
        steps = max(self.steps // part, 4)
        warm = f"--lr_scheduler.warmup_steps={steps // 10}"
        return f"--training.steps={steps}", warm, "--no-validation.enable", "--no-checkpoint.enable"

    def optimizer(self, name: str, rate: float) -> tuple[str, ...]:
        return f"--optimizer.name={name}", f"--optimizer.lr={rate}"

    def best(self, name: str) -> tuple[str, ...]:
        ends = json.loads((self.results / "rates.json").read_text())[name]
        return self.optimizer(name, float(min(ends, key=ends.get)))

    def tokens(self) -> Any:
        """Tokenizer, tokens, and this machine's speed for plans."""
        made = WORK / "tokenizer.json"
        if not made.exists():
            text = ("--dataset", WORK / "text/train", "--vocab-size", 32000)
            command("tokenizer", "train", *text, "--output", made)
        for source in ("docs", "c", "python"):
            text = ("--dataset", WORK / f"text/train/{source}.jsonl", "--tokenizer", made)
            command("data", "tokenize", *text, "--output", WORK / f"tokens/{source}")
        command("plan", self.recipe, "--calibrate", "--output", WORK / "hardware.toml")
        indices = {each.parent.name: each for each in WORK.glob("tokens/*/index.json")}
        prepared = json.loads((WORK / "text.json").read_text())
        tokens = {name: json.loads(path.read_text()) for name, path in indices.items()}
        return {"text": prepared, "tokens": {k: v["tokens"] for k, v in sorted(tokens.items())}}

    def sizes(self) -> Any:
        """Two sizes for a few steps, and the plan of each."""
        found = {}
        for name, flags in SIZES.items():
            self.train(f"size_{name}", *self.short(20), *flags)
            on = ("--hardware", WORK / "hardware.toml")
            found[name] = curve(f"size_{name}")
            found[name]["plan"] = command("plan", self.recipe, *flags, *on, json_out=True)
        return found

    def rates(self) -> Any:
        """The loss of a tenth of the run, by optimizer and learning rate."""
        found: dict[str, dict[str, float]] = {}
        for name, rates in RATES.items():
            for rate in rates:
                run = f"rate_{name}_{rate}"
                self.train(run, *self.short(10), *self.optimizer(name, rate))
                found.setdefault(name, {})[str(rate)] = curve(run)["end"]
        return found

    def twin(self) -> Any:
        """The run without a disturbance."""
        self.train("twin", *self.best("Muon"))
        return curve("twin")

    def adamw(self) -> Any:
        self.train("adamw", *self.best("AdamW"))
        return curve("adamw")

    def main(self) -> Any:
        """The run: another layout for a while, and a `kill -9` within a save."""
        best = self.best("Muon")
        saves = WORK / "runs/main/checkpoint"

        def reached(step: int) -> Callable[[], int]:
            return lambda: signal.SIGTERM * (last() >= step)

        def last() -> int:
            return max((row["step"] for row in rows("main") if "loss" in row), default=0)

        def saving() -> int:
            return signal.SIGKILL * any(saves.glob("*.saving"))

        marks = []
        split = (
            "--parallelism.tensor_parallel_degree=2",
            "--parallelism.data_parallel_shard_degree=2",
        )
        for flags, until, what in (
            ((), reached(self.steps // 4), "FSDP 2 x TP 2"),
            (
                ("--processes=4", *split),
                reached(self.steps // 4 + max(self.steps // 60, 2)),
                "one rank",
            ),
            ((), saving, "kill -9 in a save"),
        ):
            self.train("main", *best, *flags, until=until)
            marks.append([last(), what])
        self.train("main", *best)
        return curve("main") | {"marks": marks}

    def by_hand(self) -> Any:
        """The plain loop and the trainer with AdamW, from three seeds each."""
        import torch

        from torchtitan.build import build
        from torchtitan.checks import load_job
        from torchtitan.parallel import open_world

        shared = [*self.best("AdamW"), *self.short(20)]
        flags = [*shared, f"--job.dump_folder={WORK / 'runs/batches'}"]
        job = load_job(self.recipe, flags, 1, "cuda" if torch.cuda.is_available() else "cpu").config
        with open_world(job.degrees(1), job.comm) as world:
            run = build(job, world)
            with closing(run.batches):
                micro = [next(run.batches)[0] for _ in range(job.training.steps)]
        parts = [[np.c_[b.tokens.cpu(), b.targets.cpu()[:, -1:]] for b in step] for step in micro]
        np.save(WORK / "batches.npy", np.stack([np.concatenate(step) for step in parts]))
        args, optimizer = job.model_args(), job.optimizer
        named = (
            "dim",
            "n_heads",
            "n_kv_heads",
            "n_layers",
            "ffn_dim",
            "vocab_size",
            "norm_eps",
            "rope_theta",
        )
        settings = {key: getattr(args, key) for key in named} | {
            key: getattr(optimizer, key) for key in ("beta1", "beta2", "eps", "weight_decay")
        }
        settings |= {"seq_len": job.training.seq_len, "max_norm": job.training.max_norm}
        settings["accumulated"] = len(micro[0])
        found: dict[str, Any] = {"ours": [], "by hand": []}
        for seed in SEEDS:
            self.train(f"seed_{seed}", *shared, f"--debug.seed={seed}")
            ours = curve(f"seed_{seed}")
            rates = [row["lr"] for row in rows(f"seed_{seed}") if "loss" in row]
            (WORK / "settings.json").write_text(
                json.dumps(settings | {"rates": rates, "seed": seed})
            )
            names = [str(WORK / name) for name in ("settings.json", "batches.npy", "hand.json")]
            subprocess.run(
                [sys.executable, "-m", "benchmarks.real_run.by_hand", *names], check=True
            )
            hand = json.loads((WORK / "hand.json").read_text())
            tokens = job.training.seq_len * len(np.concatenate(parts[0]))
            speed = tokens / statistics.median(hand["seconds"])
            found["ours"].append([ours["end"], ours["tokens_per_second"]])
            found["by hand"].append([statistics.fmean(hand["losses"][-LAST:]), speed])
        return found

    def after(self) -> Any:
        """Samples, the export and its held-out loss, the ledger, and the twins side by side."""
        run, exported = WORK / "runs/main", WORK / "exported"
        held_out = WORK / "text/held_out/docs.jsonl"
        every = [f"step-{self.steps * part // 4}" for part in (1, 2, 3, 4)]
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        samples = {}
        for name in every:
            words = ("generate", run / "checkpoint" / name, *prompts, "--tokens", 40, "--json")
            samples[name] = [json.loads(line) for line in command(*words).splitlines()]
        if not exported.exists():
            command("checkpoint", "convert", run, exported, "--to", "hf")
        texts = [json.loads(line)["text"][:BEGINNING] for line in held_out.open()][:50]
        short = WORK / "beginnings.jsonl"
        short.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return {
            "samples": samples,
            "ours": command("evaluate", run, "--dataset", short, json_out=True),
            "exported": command("evaluate", exported, "--dataset", short, json_out=True),
            "transformers": transformers_loss(exported, texts),
            "ledger": command("data", "ledger", run, "--verify", json_out=True),
        }


def transformers_loss(folder: Path, texts: Iterable[str]) -> float:
    """Nats a token that transformers gives the texts, each between BOS and EOS."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
            total += float(model(ids, labels=ids).loss) * (ids.numel() - 1)
            count += ids.numel() - 1
    return total / count


STAGES = ("tokens", "sizes", "rates", "twin", "main", "adamw", "by_hand", "after")


def run(stages: Iterable[str], driver: Driver) -> None:
    driver.results.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        target = driver.results / f"{stage}.json"
        if target.exists():
            continue
        begin = time.time()
        found = getattr(driver, stage)()
        target.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{stage}: {(time.time() - begin) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], help="Default: all.")
    parser.add_argument("--large", action="store_true", help="The recipe for a GPU.")
    parser.add_argument("--steps", type=int, help="Fewer steps, for a rehearsal.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/real_run")
    chosen = parser.parse_args()
    recipe = HERE / ("large.toml" if chosen.large else "recipe.toml")
    if chosen.steps:
        shorter = WORK / "rehearsal.toml"
        keys = f"[training]\nsteps = {chosen.steps}\n[checkpoint]\ninterval = {chosen.steps // 4}\n"
        keys += f"[validation]\nfreq = {chosen.steps // 4}\n[lr_scheduler]\nwarmup_steps = 1\n"
        shorter.write_text(f'extends = "{recipe}"\n{keys}')
        recipe = shorter
    import tomli

    total = chosen.steps or tomli.loads(recipe.read_text())["training"]["steps"]
    run(chosen.stages or STAGES, Driver(recipe, chosen.results, total))
