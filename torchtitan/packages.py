"""Packages that this one needs or can use, and the other distribution called `torchtitan`."""

import ast
import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tomli

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION: Final = "torchtitan-pretrain"
PACKAGE: Final = Path(__file__).parent


def on_first_use(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports each of its names on first use.

    So a command that reads one section's settings does not import what the others configure.

    Args:
        file: the `__init__.py` of the package, which imports the names for type checkers alone.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    homes = {alias.name: str(node.module) for node in found for alias in node.names}

    def named(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return named


@cache
def requirements() -> dict[str, "Requirement"]:
    """Return the packages that this one works with by their names; an optional one has a marker."""
    from packaging.requirements import Requirement

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a clone on PYTHONPATH
        text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
        project = tomli.loads(text)["project"]
        lines = project["dependencies"] + [
            f"{line}; extra == '{extra}'"
            for extra, needed in project["optional-dependencies"].items()
            for line in needed
        ]
    return {_normal(each.name): each for each in map(Requirement, lines)}


def install(package: str) -> str:
    """Return the command that installs a package, in a version that works with this one."""
    requirement = requirements().get(_normal(package))
    versions = sorted(map(str, requirement.specifier), reverse=True) if requirement else ()
    return f'pip install "{package}{",".join(versions)}"' if versions else f"pip install {package}"


def is_installed(module: str) -> bool:
    """Whether a module can be imported.

    A mere folder of that name, such as the `wandb/` that W&B leaves behind, has no origin.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def other_torchtitan() -> str | None:
    """Return the version of Meta's distribution `torchtitan`, if this environment has it, too.

    It has no command, unlike this project, which had the same name before.
    """
    for found in distributions(name="torchtitan"):
        if not found.entry_points:
            return found.version
    return None


@cache
def warn_of_other() -> None:
    """Warn once of another distribution that installs files of the same import name."""
    if version := other_torchtitan():
        logging.getLogger("torchtitan").warning(
            "Meta's torchtitan %s is installed in this environment, too, and has the same import "
            "name; the files in %s are used. To remove it: pip uninstall torchtitan, and then "
            "install %s again, as both own some of the files",
            version,
            PACKAGE,
            DISTRIBUTION,
        )


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
