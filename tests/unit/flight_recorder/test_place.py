"""The place of an error, whatever the folders are called that the code is in."""

import sys
from pathlib import Path

import pytest

from tests import forked
from torchtitan.flight_recorder.records import place

FILES = ("torchtitan/__init__.py", "torchtitan/parallel/world.py", "tests/faults.py")


def shown(file):
    return place([(str(file), 3, "f")])


def clone(folder):
    """A folder with some files of a clone, and others that only have names like them."""
    for name in (*FILES, "parallel/world.py", "tools/deep/cli.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("name", ["torchtitan", "torch", "titan", "my torchtitan", "a/torch/b"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_place_does_not_depend_on_where_the_clone_is(name, is_linked, tmp_path):
    folder = tmp_path / name
    if is_linked:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(clone(tmp_path / "real/torch/torchtitan"))
    else:
        clone(folder)
    assert shown(folder / "tests/faults.py") == "tests/faults.py:3 (f)"
    assert shown(folder / "torchtitan/parallel/world.py") == "torchtitan/parallel/world.py:3 (f)"
    assert shown(folder / "parallel/world.py") == "parallel/world.py:3 (f)"
    assert shown(folder / "tools/deep/cli.py") == "deep/cli.py:3 (f)"


def test_torch_is_no_place(tmp_path):
    made = tmp_path / "torch/torch"
    (made / "nn").mkdir(parents=True)
    for name in ("__init__.py", "nn/modules.py"):
        (made / name).touch()
    assert not shown(made / "nn/modules.py")
    assert not shown("<string>")


def test_files_of_another_machine_are_known_by_their_paths():
    assert shown("/x/torch/torchtitan/torchtitan/parallel/world.py") == (
        "torchtitan/parallel/world.py:3 (f)"
    )
    assert shown("/x/torchtitan/tests/faults.py") == "tests/faults.py:3 (f)"
    assert not shown("/x/site-packages/torch/nn/modules.py")
    assert shown("/x/mine/model.py") == "mine/model.py:3 (f)"


LOOK = """
import sys, traceback
from parallel.mine import exchange
from torchtitan.flight_recorder.recorder import waits_in_p2p
from torchtitan.parallel import world

look = lambda: waits_in_p2p(traceback.walk_stack(sys._getframe(1)))
assert not exchange(look)
exec(compile("def recv(call): return call()", world.__file__, "exec"))
assert recv(look)
print(world.__file__)
"""


@pytest.mark.parametrize("name", ["torchtitan", "torch", "with a space"])
def test_waiting_is_seen_in_functions_of_this_package(name, tmp_path):
    """Not in those of a folder that is called `parallel`, too."""
    root = Path(__file__).parents[3]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "torchtitan").symlink_to(root / "torchtitan")
    (folder / "parallel").mkdir()
    (folder / "parallel/mine.py").write_text("def exchange(call): return call()")

    def look():
        for module in [each for each in sys.modules if each.partition(".")[0] == "torchtitan"]:
            del sys.modules[module]  # those of the clone
        exec(LOOK, {})

    done = forked.run(look, folder)
    assert done.status == 0, done.stderr
    assert done.stdout == f"{folder}/torchtitan/parallel/world.py\n"
