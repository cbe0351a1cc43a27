"""The settings of a schema as the text of `--help`."""

from torchtitan.config import all_sections, sections


def help_text(schema):
    """A line of each section and of each setting."""
    lines = []
    for section in sections(all_sections(schema)):
        lines.append(f"{section.title}: {section.about}")
        lines += [f"  --{e.path}  ({e.allowed}; default: {e.default})" for e in section.entries]
    return "\n".join(lines)
