"""`scripts/gpu`: see docs/gpu.md."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests.gpu import pool


def stage_cases(stage: str, rehearsed: bool) -> list[str]:
    if stage == "fast":
        from tests.gpu import fast

        return fast.names(rehearsed)
    if stage == "many":
        from tests.gpu import many

        return list(many.CASES)
    if stage == "right":
        from tests.gpu import right

        return [*right.CASES, *right.FUNCTIONS]
    if stage == "ranks":
        from tests.layouts import LAYOUTS

        return list(LAYOUTS)
    from tests.gpu import runs

    return list(runs.CASES)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="Prove and measure a GPU.")
    parser.add_argument("--stage", nargs="+", default=["right", "runs", "ranks"])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    kind, backend = ("cpu", "aot_eager") if arguments.rehearse else ("cuda", "inductor")
    until = time.monotonic() + 60 * arguments.minutes
    for stage in arguments.stage:
        begin, results = time.monotonic(), []
        with open(arguments.output / f"{stage}.jsonl", "w") as kept:

            def tell(result: pool.Result) -> None:
                results.append(result)
                kept.write(json.dumps(result._asdict()) + "\n")
                kept.flush()
                first = (result.error or "").strip().splitlines()[:1]
                word = "FAILED" if result.error else "ok"
                figures = " ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                    for k, v in result.figures.items()
                )
                print(f"{word:6} {stage}: {result.case} ({result.seconds} s) {figures}", *first)
                sys.stdout.flush()

            pool.run(
                [
                    c
                    for c in stage_cases(stage, arguments.rehearse)
                    if not arguments.only or any(o in c for o in arguments.only)
                ],
                (stage, kind, backend),
                workers=1 if stage in ("fast", "many") else arguments.workers,
                limit=arguments.limit,
                until=until,
                log=str(arguments.output / f"{stage}.log"),
                tell=tell,
            )
        failed = sum(result.error is not None for result in results)
        print(
            f"{stage}: {len(results) - failed} passed, {failed} failed, "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
