"""Writes sections of pages of results, and puts a table of one into a page of the documentation."""

import re
from pathlib import Path


def quote(name: str, table: str, page: Path) -> None:
    """Write `table` where `page` has a place for what benchmarks/`name` writes.

    That is below the comment that says so, up to the next empty line after it.
    """
    mark = rf"<!-- Written by benchmarks/{re.escape(name)} -->\n"
    place = re.compile(rf"({mark}\n)(?:\|.*\n)*", re.MULTILINE)
    text, places = place.subn(lambda found: found[1] + table + "\n", page.read_text("utf-8"))
    assert places == 1, f"{page} has {places} places for the table"
    page.write_text(text, encoding="utf-8")


def write_section(page: Path, text: str) -> None:
    """Replace the section of a page that has the heading of `text`, or add it at the end."""
    old = page.read_text("utf-8") if page.exists() else ""
    parts = re.split(r"^(?=## )", old, flags=re.MULTILINE)
    sections = {part.partition("\n")[0]: part.strip() for part in parts if part}
    sections[text.partition("\n")[0]] = text.strip()
    page.write_text("\n\n".join(sections.values()) + "\n", encoding="utf-8")
