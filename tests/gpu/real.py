"""Stage 7: the real run of 125 million parameters, in pieces that each continue the one before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("tokens", "sizes", "rates", "main", "by_hand", "after")
TEXT = {"docs": "docs/*.md", "c": "train_configs/*.toml", "python": "torchtitan/data/*.py"}


def names(rehearsed):
    return ["the real run"]


def check(name, device, backend):
    if device.type == "cuda":
        work = ROOT / "outputs/real_run"
        if not (work / "text.json").exists():
            return {"left out": f"no text: python -m benchmarks.real_run.prepare {work} --large"}
        return piece(ROOT, work / "results", "--large", "--minutes", "8")
    with TemporaryDirectory() as folder:
        write_text(Path(folder, "outputs/real_run"))
        return piece(folder, Path(folder, "results"), "--steps", "8")


def piece(folder, results, *flags):
    """Run what is not done, within minutes; what is known then."""
    program = [sys.executable, "-m", "benchmarks.real_run.run", *STAGES, "--results", results]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, *flags], cwd=folder, env=environment, capture_output=True, text=True
    )
    is_late = "the same command continues" in done.stderr
    assert is_late or not done.returncode, done.stdout[-500:] + done.stderr[-1500:]
    found = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    if "main" not in found:
        return {"left out": f"done: {', '.join(found)}; the same command continues"}
    return {key: found["main"][key] for key in ("end", "tokens_per_second", "seconds")}


def write_text(work):
    """This project's own text in place of that of packages."""
    for split in ("train", "held_out"):
        (work / "text" / split).mkdir(parents=True)
        for source, pattern in TEXT.items():
            texts = [path.read_text() for path in sorted(ROOT.glob(pattern))]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (work / "text" / split / f"{source}.jsonl").write_text(lines)
    (work / "text.json").write_text("{}")
