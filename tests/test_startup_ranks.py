"""What a rank does at start does not grow with the number of ranks, where it need not."""

import json
import os
import pickle
import shutil
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import forked
from torchtitan import trainer
from torchtitan.checks import load_job
from torchtitan.config import kept_for_ranks
from torchtitan.flight_recorder import notes
from torchtitan.metrics.startup import Startup

ROOT = Path(__file__).parents[1]
RECIPE = "debug_model"
LOCAL, SEQ_LEN = 8, 32
LINES, LANES = 2000, 16384
FLAGS = f"""--training.seq_len {SEQ_LEN} --training.local_batch_size 1
    --no-validation.enable --no-data.report_unigram_loss --data.dataset jsonl
    --metrics.log_freq 1""".split()


class Counts:
    def __init__(self):
        self.found = Counter()
        self.paths = []
        self._is_ours = False

    def watch_files(self):
        """Count the files and folders that are opened from now on."""

        def see(event, args):
            if self._is_ours:
                return
            if event == "open" and isinstance(args[0], str):
                self.paths.append(args[0])
            elif event in ("os.listdir", "os.scandir") and isinstance(args[0], str):
                self._is_ours = True
                if os.path.isdir(args[0]) and str(ROOT) not in args[0]:
                    self.found["entries of folders"] += len(os.listdir(args[0]))
                self._is_ours = False

        sys.addaudithook(see)

    def result(self):
        code = {str(getattr(m, "__file__", "")) for m in list(sys.modules.values())}
        apart = ("/proc", "/sys", "/dev", "__editable__", sys.prefix, sys.base_prefix)
        paths = [p for p in self.paths if p not in code and not p.startswith(apart)]
        opened = [p for p in paths if not p.endswith((".pyc", ".so", ".sent"))]
        recipes = sum(p.endswith(f"{RECIPE}.toml") for p in opened)
        none = {"entries of folders": 0}
        return {**none, **self.found, "files opened": len(opened), "recipes opened": recipes}


@contextmanager
def among_others(counts, ranks, sent):
    """Be a rank of many that do not exist; rank 0 keeps what it broadcasts for a later one."""
    rank, found, replace = int(os.environ["RANK"]), counts.found, mock.patch.object
    start, group_of, reduce = dist.init_process_group, dist.new_group, dist.all_reduce
    kept = [] if rank == 0 else pickle.loads(sent.read_bytes())

    def join(*args, **settings):
        start("fake", store=FakeStore(), rank=rank, world_size=ranks)

    def make(members=None, *args, **settings):
        settings |= {"backend": None}
        return group_of(members, *args, **settings)

    def received(kind, data, times):
        found[kind] += 1
        found["objects received"] += times
        return [pickle.loads(data) for _ in range(times)]

    def all_gather(values, value, group=None):
        values[:] = received("gathers on all ranks", pickle.dumps(value), len(values))

    def gather(value, values, **_):
        if values is not None:
            values[:] = received("gathers on rank 0", pickle.dumps(value), len(values))
            for other, state in enumerate(values):
                if isinstance(state, dict) and "lanes" in state:  # each rank has lanes of its own
                    own = state["lanes"].items()
                    lanes = {(int(lane) + other) % LANES: record for lane, record in own}
                    state["lanes"] = {str(lane): record for lane, record in lanes.items()}

    def broadcast(values, **_):
        if rank == 0:
            kept.append(pickle.dumps(values))
            sent.write_bytes(pickle.dumps(kept))
        values[:] = received("broadcasts", kept[0] if rank else kept[-1], 1)[0]
        if rank:
            del kept[0]

    def all_reduce(tensor, *args, **settings):
        group = settings.get("group")
        if group is not None and group.group_desc == "slow":
            found["reductions of flags"] += 1
            found["their bytes"] += tensor.nbytes
        return reduce(tensor, *args, **settings)

    with (
        replace(dist, "init_process_group", join),
        replace(dist, "new_group", make),
        replace(dist, "all_reduce", all_reduce),
        replace(dist, "all_gather_object", all_gather),
        replace(dist, "gather_object", gather),
        replace(dist, "broadcast_object_list", broadcast),
    ):
        yield


def take_part(words):
    """Start as one rank, print what it has done by the end of the first step, and exit."""
    counts, dump = Counts(), Path(words[words.index("--job.dump_folder") + 1])

    def end(*_):
        print(json.dumps(counts.result()), flush=True)
        os._exit(0)

    sent = dump.with_name(f"{dump.name}.sent")
    ranks = int(os.environ["WORLD_SIZE"])
    with (
        among_others(counts, ranks, sent),
        mock.patch.object(Startup, "after_step", end),
        mock.patch.object(notes, "MEMORY", dump),  # as nothing deletes its note
    ):
        counts.watch_files()
        raise RuntimeError(f"the rank ended with status {trainer.main([RECIPE, *words])}")


def write_data(folder):
    folder.mkdir()
    lines = (json.dumps({"text": f"{n} " + "words " * 20}) for n in range(LINES))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def words(ranks, dump, resume):
    shards = min(ranks, LOCAL)
    degrees = {"shard": shards, "replicate": ranks // shards}
    return [
        *(*FLAGS, "--data.dataset_path", str(dump.parent / "data"), "--data.lanes", str(LANES)),
        *("--training.global_batch_size", str(ranks), "--job.dump_folder", str(dump)),
        *("--checkpoint.resume", resume),
        *(f"--parallelism.data_parallel_{kind}_degree={n}" for kind, n in degrees.items()),
    ]


def count(sizes, folder):
    """Count what rank 0 and a middle rank of each size do when they resume a run.

    Returns:
        By size, and whether it is rank 0.
    """
    write_data(folder / "data")
    started(trainer.main, [RECIPE, *words(1, folder / "saved", "auto")], 1, 0, steps=1)
    found = {}
    for ranks in sizes:
        dump = folder / str(ranks)
        leave_run(folder / "saved", dump, ranks)
        with kept_for_ranks():  # as their launcher does
            load_job(RECIPE, words(ranks, dump, "must"), ranks, "cpu")
            for rank in (0, ranks // 2):
                said = started(take_part, words(ranks, dump, "must"), ranks, rank, steps=3)
                found[ranks, rank == 0] = json.loads(said.splitlines()[-1])
    return found


def started(command, words, ranks, rank, steps):
    """Run a command as a rank of that many, in a fork, and return what it printed."""
    place = {"RANK": rank, "WORLD_SIZE": ranks}
    place |= {"LOCAL_RANK": rank % LOCAL, "LOCAL_WORLD_SIZE": min(ranks, LOCAL)}

    def start():
        warnings.simplefilter("ignore")  # of torch, about a group that is none
        if ranks > 1:
            os.environ.update({name: str(value) for name, value in place.items()})
        return command([*words, "--training.steps", str(steps)])

    done = forked.run(start, ROOT)
    assert done.status == 0, done.stderr[-4000:]
    return done.stdout


def leave_run(saved, dump, ranks):
    """Leave what an earlier run of as many ranks leaves: a checkpoint, and a note of each rank."""
    shutil.copytree(saved, dump)
    (dump / "comm_traces").mkdir(exist_ok=True)
    for rank in range(ranks):
        (dump / "comm_traces" / f"{rank}.step").write_text("{}")


FEW, MANY = 8, 64
STEADY = (
    *("files opened", "broadcasts", "gathers on rank 0", "gathers on all ranks"),
    *("reductions of flags", "their bytes"),
)


@pytest.mark.gate
def test_a_start_among_more_ranks_does_no_more(tmp_path):
    """A resumed one, which reads all that a start reads."""
    found = count((FEW, MANY), tmp_path)
    for is_first in (True, False):
        few, many = found[FEW, is_first], found[MANY, is_first]
        assert {name: few.get(name) for name in STEADY} == {name: many.get(name) for name in STEADY}
        assert "gathers on all ranks" not in many
        assert many["broadcasts"] == 1
        assert (many["recipes opened"], many.get("gathers on rank 0", 0)) == (0, is_first)
        more = MANY - FEW if is_first else 0
        # Rank 0 gathers the positions in the data, and looks for notes of ranks that are no more.
        assert many["objects received"] - few["objects received"] == more
        assert many["entries of folders"] - few["entries of folders"] == more
