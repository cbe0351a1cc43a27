"""Launching, watching and preparing of runs on the nodes of a cluster."""

ENTRIES = {
    "launcher": {"train": "launcher:train"},
    "monitor": {"serve": "health:open_health"},
    "verb.Recipes": {"manifest": "manifest:app", "preflight": "preflight:app"},
}
"""Place of each entry, by the registry of the core and the name in it."""
