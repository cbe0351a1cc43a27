"""Planted faults follow the code: each can still be planted, and is described."""

import ast

from tests.mutations.faults import ROOT, TIERS, read_faults


def test_every_fault_can_be_planted():
    faults = read_faults()
    assert len(faults) >= 60
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        planted = fault.planted((ROOT / fault.file).read_text())
        assert fault.before.endswith("\n"), f"{fault.name}: whole lines"
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse((ROOT / fault.file).read_text()))
        assert fault.tier in TIERS, fault.name
        assert fault.breaks.endswith("."), fault.name


def test_the_tests_that_found_a_fault_exist():
    gone = []
    for name in (test for fault in read_faults() for test in fault.found_by):
        file, _, function = name.partition("[")[0].partition("::")
        path = ROOT / file
        if not path.is_file() or (function and f"def {function}(" not in path.read_text()):
            gone.append(name)
    assert gone == []
