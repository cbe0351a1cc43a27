"""Breaks files as disks, copies and hands do: flips, cuts, exchanges, other names, other values."""

import json

ODD = [None, True, -1, 0, 2**40, 1e300, "", "x", [], [1], {}, {"a": 1}, "../x", "\0"]


def flip(path, dice):
    content = bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 3) if content else 0):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def flip_in_the_beginning(path, dice):
    """Where formats keep what they are."""
    content = bytearray(path.read_bytes())
    if content:
        content[dice.randrange(min(len(content), 64))] = dice.randrange(256)
    path.write_bytes(content)


def cut(path, dice):
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(len(content) + 1)])


def lengthen(path, dice):
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randint(1, 50)))


def blank(path, dice):
    """A block that was never written."""
    content = bytearray(path.read_bytes())
    start = dice.randrange(len(content) + 1)
    end = min(len(content), start + 64)
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def remove(path, dice):
    path.unlink()


def rename(path, dice):
    suffix = dice.choice(["", ".txt", ".json", ".jsonl", ".gz", ".parquet", ".safetensors", ".pth"])
    path.rename(path.with_name(f"x{path.name.split('.')[0]}{suffix}"))


def make_folder(path, dice):
    path.unlink()
    path.mkdir()


def exchange(path, dice):
    """With another file beside it."""
    other = dice.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def change_json(path, dice):
    """Another value, or none, anywhere in a JSON file; other files are flipped."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        flip(path, dice)
        return
    node, places = content, [((), content)]
    found = []
    stack = [content]
    while stack:
        node = stack.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            found.append((node, key))
            if isinstance(value, dict | list):
                stack.append(value)
    assert places
    if found:
        node, key = dice.choice(found)
        node[key] = dice.choice(ODD)
        if isinstance(node, dict) and dice.random() < 0.3:
            del node[key]
    path.write_text(json.dumps(content))


MUTATIONS = [
    *(flip, flip_in_the_beginning, cut, lengthen, blank, remove, rename, make_folder, exchange),
    *(change_json, change_json, change_json),
]


def mutate(folder, dice):
    """Break something in a folder; says what, for a test that fails."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, how = dice.choice(files), dice.choice(MUTATIONS)
    how(path, dice)
    return f"{how.__name__} of {path.relative_to(folder)}"
