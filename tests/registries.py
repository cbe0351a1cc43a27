"""What a test registers is gone after it: the names, and the modules that add them."""

import importlib
import sys
import sysconfig
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torchtitan.build
import torchtitan.tools.evaluate  # noqa: F401
from torchtitan.config import Registry

INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


def find_registries():
    """Every dict that is a constant of a module, by the shortest of its names."""
    found = {
        f"{module}.{name}": value._entries if isinstance(value, Registry) else value
        for module, there in sys.modules.items()
        if module.partition(".")[0] == "torchtitan"
        for name, value in vars(there).items()
        if name.isupper() and isinstance(value, dict | Registry)
    }
    shortest = {id(found[name]): name for name in sorted(found, key=len, reverse=True)}
    return {name: found[name] for name in shortest.values()}


def copied():
    return {name: dict(registry) for name, registry in REGISTRIES.items()}


REGISTRIES = find_registries()
SHIPPED = copied()
"""As the library has them."""
importlib.import_module("tests.tiny")
EXPECTED = copied()
"""As every test finds them: with the model of the tests."""


@contextmanager
def for_one_test():
    """What is added meanwhile is gone afterwards; a module that did so must be imported again."""
    found = [
        f"{name}[{key!r}]"
        for name, registry in REGISTRIES.items()
        for key in registry.keys() - EXPECTED[name].keys()
    ]
    assert not found, f"{found}: added by imports of a test's module, or a fixture of several tests"
    modules = set(sys.modules)
    with having(EXPECTED):
        yield
    for name in sys.modules.keys() - modules:
        if is_of_tests(name):
            del sys.modules[name]


@contextmanager
def having(content):
    """Registries have this content meanwhile; with `SHIPPED`, none that tests have registered."""
    with ExitStack() as stack:
        for name, registry in REGISTRIES.items():
            stack.enter_context(patch.dict(registry, content[name], clear=True))
        yield


def is_of_tests(module):
    """Whether it is neither installed nor the library's, and may add names when it is imported."""
    file = getattr(sys.modules[module], "__file__", None)
    return bool(file) and not module.startswith("torchtitan") and not file.startswith(INSTALLED)
