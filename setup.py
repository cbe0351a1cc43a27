"""The parts of the build that `pyproject.toml` cannot express: recipes, pages, and the README."""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)]*)\)")
"""Relative link or image of a Markdown page."""


def long_description(readme: str, home: str) -> str:
    """Make the relative links of the README absolute, or plain text without a `home`."""

    def replaced(link: re.Match[str]) -> str:
        kind, text, target = link.groups()
        if not home:
            return text
        page = f"README.md{target}" if target.startswith("#") else target
        return f"{kind}[{text}]({home}/{'raw' if kind else 'blob'}/HEAD/{page})"

    return LINK.sub(replaced, readme)


if __name__ == "__main__":
    home = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["torchtitan"]["home"]
    setup(
        packages=[
            *find_namespace_packages(include=["torchtitan*"], exclude=["*__pycache__*"]),
            "torchtitan.pages",
            "torchtitan.recipes",
            *(f"torchtitan.recipes.{name}" for name in find_namespace_packages("train_configs")),
        ],
        package_dir={"torchtitan.pages": "docs", "torchtitan.recipes": "train_configs"},
        long_description=long_description((ROOT / "README.md").read_text("utf-8"), home),
        long_description_content_type="text/markdown",
        project_urls={"Repository": home} if home else {},
    )
