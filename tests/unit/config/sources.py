"""Recipes of any schema, read from TOML and flags."""

from pathlib import Path

from torchtitan.config import Gathered, load, merge, read_flags, read_recipe


def read_as(schema, text="", flags=""):
    Path("r.toml").write_text(text, encoding="utf-8")
    problems = []
    notices = []
    settings = merge(schema, read_recipe(Path("r.toml"), problems), notices)
    above, wrong = read_flags(flags.split(), schema, settings)
    settings = merge(schema, [settings, above], notices)
    gathered = Gathered(settings, "r.toml", notices, [*problems, *wrong])
    return load(schema, gathered, check=lambda config: [])
