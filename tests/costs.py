"""The processor time of tests, as a pytest plugin: what exceeds its limit is listed after a run.

A test may take 2 seconds of processor, those of the processes that it starts included; one marked
`costs("why")` 10. Nothing fails above: a busy or slow machine must not turn a right change red.
"""

import resource

import pytest

LIMIT, LIMIT_WITH_REASON = 2.0, 10.0
SHOWN = 20
SPENT = pytest.StashKey[float]()


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(), "costs of tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        limit = LIMIT_WITH_REASON if item.get_closest_marker("costs") else LIMIT
        report.user_properties += [("processor", processor_seconds() - item.stash[SPENT])]
        report.user_properties += [("limit", limit)]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[SPENT] = processor_seconds()


def processor_seconds():
    """Seconds of processor that this process has used, and those it started that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Costs:
    """Adds up reports, in the process that prints them."""

    def __init__(self):
        self.above = []

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            found = dict(report.user_properties)
            if found["processor"] > found["limit"]:
                self.above.append((found["processor"], report.nodeid))

    def pytest_terminal_summary(self, terminalreporter):
        if self.above:
            terminalreporter.section(f"{len(self.above)} tests exceed their seconds of processor")
            for spent, name in sorted(self.above, reverse=True)[:SHOWN]:
                terminalreporter.write_line(f"{spent:6.1f} s  {name}")
