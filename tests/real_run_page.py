"""What docs/real_run.md says with numbers, made of the results of the real run."""

import json
import tomllib
from collections import Counter
from itertools import pairwise

from benchmarks.real_run.prepare import SIMILAR
from benchmarks.real_run.run import LAST
from tests.sources import ROOT

RESULTS = ROOT / "benchmarks/results/real_run"
MOMENT = 2  # s


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def of_text(packages, tokens):
    for source, count in tokens.items():
        cells = []
        for split in ("train", "held_out"):
            some = [p for p in packages if (p["source"], p["split"]) == (source, split)]
            cells += [len(some), f"{sum(p['documents'] for p in some):,}"]
            cells.append(f"{sum(p['bytes'] for p in some) / 1e6:.1f}")
        yield row(source, *cells, f"{count / 1e6:.1f}")
    removed = sum((Counter(package["removed"]) for package in packages), Counter())
    for rule, count in removed.most_common():
        yield row(rule, f"{count:,}")


def of_sizes(sizes, steps):
    for name, size in sizes.items():
        plan = size["plan"]
        memory = plan["memory"]["peak_reserved_gib"]["value"]
        memory += plan["memory"]["outside_allocator_gib"]
        each = plan["speed"]["tokens_per_second_per_device"]["value"]
        speeds = each * plan["world_size"], size["tokens_per_second"]
        minutes = (f"{plan['batch']['tokens'] * steps / speed / 60:.0f}" for speed in speeds)
        parameters = f"{plan['model']['parameters']:,}"
        memories = f"{memory:.2f}", f"{size['memory_gib']:.2f}"
        yield row(name, parameters, *memories, *(f"{speed:,.0f}" for speed in speeds), *minutes)


def of_pauses(main):
    """Time between steps, above that of a step, where it is more than a moment."""
    every = [pause[0] for pause in main["pauses"]]
    for place in (1, 2):
        found = [pause[place] for pause in main["pauses"]]
        yield f"{min(found):.1f} to {max(found):.1f} s"
    times = main["times"]
    for step, ((before, _), (time, seconds)) in enumerate(pairwise(times), 2):
        if (pause := time - seconds - before) > MOMENT and step not in every:
            yield f"| {step} | {pause:,.0f} |"


def of_marks(main, twin):
    yield from (f"| {step} | {what} |" for step, what in main["marks"])
    apart = [abs(a - b) / b for a, b in zip(main["losses"], twin["losses"], strict=True)]
    equal = next(step for step, each in enumerate([*apart, 1]) if each)
    yield f"equal to the last bit for {equal} steps"
    yield f"at most {max(apart):.1e} of the loss"


def results():
    return {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}


def samples():
    """Yield the samples of the first prompt as the page shows them."""
    for step, (first, *_) in results()["after"]["samples"].items():
        yield f"Step {step}:\n\n```text\n{first['prompt']}{first['continuation'].rstrip()}\n```\n"


def of_recipe(recipe):
    """What the recipe, the preparation and the driver have as settings."""
    weights = (source["weight"] for source in recipe["data"]["sources"])
    docs, c, python = (f"{weight:.0%}".replace("%", " %") for weight in weights)
    yield f"{docs} documentation, {c} C and {python} Python"
    yield f"made {recipe['model']['vocab_size']:,} entries"
    yield f"Jaccard index above {SIMILAR}"
    yield f"of the last {LAST} steps"
    yield f"Every {recipe['validation']['freq']} steps"
    yield f"train {recipe['training']['steps'] // 20} steps"


def stated():
    """Yield the tables and the phrases of the page."""
    found = results()
    main, adamw, after = found["main"], found["adamw"], found["after"]
    steps = len(main["losses"])
    yield from of_recipe(tomllib.loads((ROOT / "benchmarks/real_run/recipe.toml").read_text()))
    yield from of_text(found["tokens"]["text"].values(), found["tokens"]["tokens"])
    yield from of_sizes(found["sizes"], steps)
    yield row("optimizer", *found["rates"]["AdamW"])
    for name, ends in found["rates"].items():
        yield row(name, *(f"{loss:.2f}" for loss in ends.values()))
    yield f"{steps} steps of {main['tokens'] // steps:,} tokens"
    for name, run in {"Muon with AdamW": main, "AdamW": adamw}.items():
        held_out, bits = run["held_out"][-1][1], run["bits_per_byte"][-1][1]
        ends = f"{run['end']:.3f}", f"{held_out:.3f}", f"{bits:.3f}"
        yield row(name, *ends, f"{run['tokens_per_second']:,.0f}", f"{run['seconds'] / 60:.0f}")
    yield from of_marks(main, found["twin"])
    yield from of_pauses(main)
    yield from (f"Step {step}:" for step in after["samples"])
    ours = after["ours"]["loss"]
    yield f"{ours['documents']} documents, {ours['tokens']:,} tokens"
    yield f"{ours['loss']:.6f} nats per token here and {after['transformers']:.6f} in transformers"
    ledger = after["ledger"]
    assert ledger["is_complete"]
    assert not ledger["problems"]
    yield f"{ledger['samples']:,} samples ({ledger['tokens']:,} tokens)"
    yield f"{ledger['verified_hashes']} hashes"
    for session in ledger["sessions"]:
        if again := session["samples_trained_again"]:
            yield f"{again // session['global_batch']} steps"
    yield f"step {ledger['sessions'][-1]['step']}"
    for seed, runs in enumerate(zip(*found["by_hand"].values(), strict=True)):
        losses, speeds = zip(*runs, strict=True)
        yield row(f"{seed}", *(f"{x:.3f}" for x in losses), *(f"{x:,.0f}" for x in speeds))
