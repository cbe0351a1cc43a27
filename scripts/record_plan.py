"""Records the memory over a step of a plan in benchmarks/results/plan_memory_over_step.json.

python scripts/record_plan.py

`draw_pages.py` draws it. It is the chart of `torchtitan plan llama3_8b --world-size 8 --hardware
h100 --html FILE`.
"""

import json
from pathlib import Path

from torchtitan.checks import load_job
from torchtitan.device import GIB
from torchtitan.plan.command import NOT_NEEDED
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.page import moments
from torchtitan.plan.plan import plan
from torchtitan.plan.plan_report import ORDER

RESULT = Path(__file__).parents[1] / "benchmarks/results/plan_memory_over_step.json"


def main() -> None:
    job = load_job("llama3_8b", [], 8, "cuda", exempt=NOT_NEEDED).config
    planned = plan(job, 8, find_hardware("h100"), device_type="cuda")
    assert planned.capacity_gib is not None
    points = [*moments(planned.fullest)]
    sizes = {
        name: [round(level.get(name, 0) / GIB, 2) for *_, level in points]
        for name in ORDER
        if any(level.get(name, 0) > GIB / 4 for *_, level in points)
    }
    found = {
        "limit_gib": round(planned.capacity_gib - planned.outside_gib, 1),
        "kernels": [kernels for kernels, *_ in points],
        "moments": [moment for _, moment, _ in points],
        "gib": sizes,
    }
    RESULT.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
