"""Launching, watching and preparing of runs on the nodes of a cluster."""

ENTRIES = {
    "launcher": {"train": "train_command:train"},
    "monitor": {"serve": "health:open_health"},
    "verb.Recipes": {"manifest": "manifest:app", "preflight": "preflight.command:app"},
}
"""Place of each entry, by the registry of the core and the name in it."""
