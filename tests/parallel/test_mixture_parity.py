"""Every layout trains the same run as one rank on a mixture of tokenized sources."""

import pytest

from tests import layouts
from tests.runs import are_the_runs_of_one_rank
from tests.tiers import tiers
from tests.token_shards import drawn_documents, write_shards

LAYOUTS = ("FSDP 2 x PP 2", "FSDP 4", "HSDP 2 x 2", "TP 2 x CP 2", "FSDP 2, accumulating 4")


def mixture(folder, packing):
    sources = []
    for number, weight in enumerate((3, 2, 1)):
        path = folder / f"source-{number}"
        if not path.exists():
            write_shards(path, drawn_documents(80, seed=number))
        sources.append({"path": str(path), "weight": weight})
    stages = [{"from_step": 2, "weights": [1, 2, 3]}]
    return {"sources": sources, "stages": stages, "packing": packing}


@pytest.mark.parametrize("packing", ["join", "best_fit"])
@pytest.mark.parametrize("name", tiers(LAYOUTS, ["FSDP 2 x PP 2"], gate=["TP 2 x CP 2"]))
def test_a_mixture_is_the_same_run_on_every_layout(tmp_path, name, packing):
    layout = layouts.layout(f"{name}, documents")
    data = mixture(tmp_path, packing)

    def job(of):
        flavor = {"flavor": layout.recipe()["model"]["flavor"]}
        return layouts.job(of, "SGD", data=data, model=flavor)

    are_the_runs_of_one_rank(layout, [job(layout)], [job(layouts.alone(layout))])
