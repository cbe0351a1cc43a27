"""Rewrites the text of an old recipe in this version's form.

What was translated is written into it, and nothing else: a renamed key keeps its place, a key that
moves to another section takes its comments along, all other text stays as it is, but for gaps of
several blank lines. The edits are on what tomlkit calls the body of a table: the list of its lines,
where keys have a place among comments.
"""

import re
from collections.abc import Iterator
from typing import Any

import tomli
import tomlkit
from tomlkit.items import AoT, Comment, InlineTable, Table, Whitespace

from torchtitan.config import KeyPath
from torchtitan.tools.migrate.translate import Migration

Body = list[tuple[Any, Any]]


def rewrite(text: str, migration: Migration) -> str:
    """The text of a recipe in this version's form."""
    if not migration.notices:
        return text
    written, settings, defaults, moved, _ = migration
    document = tomlkit.parse(text.rstrip("\n") + "\n")
    _expand(document.body)
    for old, setting in written.items():
        target = moved.get(old, old)
        new = settings.get(target)
        if new is None and setting.value != {}:
            _cut(document.body, old)
        elif new and (target, new.value) != (old, setting.value):
            _rewrite(document.body, old, target, new.value)
    for target in settings.keys() - written.keys() - set(moved.values()):
        if len(target) > 2:  # in a list of sections; the list and its sections are made with it
            value = tomlkit.item(settings[target].value)
            _add(document.body, target, [(tomlkit.key(target[-1]), value)])
    _drop_empty(document.body)
    for target, setting in defaults.items():
        _add(document.body, target, [(tomlkit.key(target[-1]), tomlkit.item(setting.value))])
    return _without_gaps(tomlkit.dumps(document))


def _expand(body: Body) -> None:
    """Write sections that are inline tables, `a = { b = 1 }`, as ordinary ones, after all keys."""
    for line in list(body):
        key, item = line
        if isinstance(item, InlineTable):
            body.remove(line)
            item = tomlkit.item(item.unwrap())
            body.append((tomlkit.key(key.key), item))
        if isinstance(item, Table):
            _expand(item.value.body)


def _rewrite(document: Body, old: KeyPath, target: KeyPath, value: Any) -> None:
    """Write a key and its value under another name, or in another section."""
    body, index = _find(document, old)
    item = body[index][1]
    if item.unwrap() != value:
        old_trivia, item = item.trivia, tomlkit.item(value)
        item.trivia.comment_ws, item.trivia.comment = old_trivia.comment_ws, old_trivia.comment
    if old[:-1] == target[:-1]:
        body[index] = (tomlkit.key(target[-1]), item)
        return
    comments = _cut(document, old, with_comments=True)[:-1]
    _add(document, target, [*comments, (tomlkit.key(target[-1]), item)])


def _add(document: Body, target: KeyPath, lines: Body) -> None:
    """Write lines, of which the last is a key, into its section: the name of a section first."""
    home = _section(document, target[:-1])
    at = 0 if target[-1] == "name" else _end_of_keys(home)
    home[at:at] = lines


def _cut(document: Body, path: KeyPath, *, with_comments: bool = False) -> Body:
    """Take out a key, or also the comments right above it; returns the lines taken."""
    body, index = _find(document, path)
    start = index
    while with_comments and start and isinstance(body[start - 1][1], Comment):
        start -= 1
    lines = body[start : index + 1]
    del body[start : index + 1]
    return lines


def _tables(
    body: Body, path: KeyPath = (), *, has_keys: bool = True
) -> Iterator[tuple[KeyPath, Body, bool]]:
    """(path, body, whether it may have keys) of the document and all tables in it.

    A table that is only part of the header of another, as `a` is of `[a.b]`, may not have keys.
    """
    yield path, body, has_keys
    for key, item in body:
        if isinstance(item, Table):
            has_keys = key.is_dotted() or not item.is_super_table()
            yield from _tables(item.value.body, (*path, key.key), has_keys=has_keys)
        elif isinstance(item, AoT):
            for number, table in enumerate(item.body):
                yield from _tables(table.value.body, (*path, key.key, str(number)))


def _find(document: Body, path: KeyPath) -> tuple[Body, int]:
    """The body of a key, and its index there."""
    return next(
        (body, index)
        for above, body, _ in _tables(document)
        for index, (key, _) in enumerate(body)
        if key is not None and (*above, key.key) == path
    )


def _section(document: Body, section: KeyPath) -> Body:
    """The body of a section, made at the end of the document where there is none."""
    for path, body, has_keys in _tables(document):
        if path == section and has_keys:
            return body
    made: Body
    *above, last = section
    if not last.isdecimal():
        home, table = _section(document, tuple(above)), tomlkit.table()
        home += [(None, Whitespace("\n")), (tomlkit.key(last), table)]
        made = table.value.body
        return made
    home = _section(document, tuple(above[:-1]))
    sections = next((item for key, item in home if key and key.key == above[-1]), None)
    if sections is None:
        sections = tomlkit.aot()
        home.append((tomlkit.key(above[-1]), sections))
    while len(sections.body) <= int(last):
        sections.append(tomlkit.table())
        sections.body[-1].trivia.indent = "\n"
    made = sections.body[int(last)].value.body
    return made


def _end_of_keys(body: Body) -> int:
    """The position for another key: after the last one, before blank lines and nested tables."""
    keys = [i for i, (key, item) in enumerate(body) if key and not isinstance(item, Table | AoT)]
    return keys[-1] + 1 if keys else 0


def _without_gaps(text: str) -> str:
    """The text with one blank line where there are several, unless they are part of a value."""
    tidy = re.sub(r"\n{3,}", "\n\n", text.strip("\n")) + "\n"
    return tidy if tomli.loads(tidy) == tomli.loads(text) else text


def _drop_empty(body: Body) -> None:
    """Take out tables without keys; comments in them stay."""
    for index in reversed(range(len(body))):
        item = body[index][1]
        if isinstance(item, Table):
            _drop_empty(item.value.body)
            if not any(key for key, _ in item.value.body):
                body[index : index + 1] = item.value.body
