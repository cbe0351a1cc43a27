"""Processor time of commands that users wait for, relative to an import of torch.

    python -m benchmarks.commands

Each command is a process of its own, started three times in turn with the others; the least counts.
"""

import os
import resource
import subprocess
import sys

TORCH = ["-c", "import torch"]
COMMANDS = {
    "--help": 0.3,
    "train --help": 0.3,
    "--help optimizer": 0.3,
    "recipes": 0.3,
    "check llama3_8b --model.tokenizer_path none --training.stpes 3": 1.2,
    "check llama3_8b --model.tokenizer_path none --optimizer.lrate 3": 1.2,
    "check llama3_8b --model.tokenizer_path none --training.qqqq 3": 1.2,
    "check llama3_8b --model.tokenizer_path none": 1.2,
    "check llama3_8b --model.tokenizer_path none --plan": None,
}
"""Words after `torchtitan`, and the most that they should take."""
ROUNDS = 3


def processor_seconds(words: list[str]) -> float:
    """Run Python with `words`, and return its processor seconds."""
    # As installed packages are, ours is compiled once, and not by every command.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print the table."""
    rows = [TORCH, *(["-m", "torchtitan", *command.split()] for command in COMMANDS)]
    rounds = [[processor_seconds(words) for words in rows] for _ in range(ROUNDS)]
    torch, *least = map(min, zip(*rounds, strict=True))
    print(f"import torch: {torch:.2f} processor seconds\n")
    print("| command | processor seconds | relative to `import torch` | at most |")
    print("|---|---|---|---|")
    for (command, most), seconds in zip(COMMANDS.items(), least, strict=True):
        print(f"| `{command}` | {seconds:.2f} | {seconds / torch:.2f} | {most or ''} |")


if __name__ == "__main__":
    main()
