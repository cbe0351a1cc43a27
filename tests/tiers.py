"""Which of the cases of a test stand in which tier: `./scripts/test`, the gate, or a release.

A case without a mark is run by `./scripts/test`. One marked `gate` is run besides by CI and by
`./scripts/test --all`, and one marked `slow` before a release only. CONTRIBUTING.md has the table.
"""

import pytest


def tiers(cases, daily, slow=(), gate=None):
    """`cases` with their marks: those neither in `daily` nor in `slow` wait for the gate.

    A case is the value of the one parameter, or a tuple with the values of several. If `gate` is
    given, it replaces `slow`: all others wait for a release. It may name cases that there are not,
    as a system from a paper may be missing.
    """
    cases = list(cases)
    if gate is not None:
        slow = [case for case in cases if case not in daily and case not in gate]
    assert set(daily) | set(slow) <= set(cases), "a tier names a case that there is not"
    assert not set(daily) & set(slow), "a case stands in one tier"
    found = []
    for case in cases:
        marks = [] if case in daily else pytest.mark.slow if case in slow else pytest.mark.gate
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=marks))
    return found
