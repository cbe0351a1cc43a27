"""Launching, watching and preparing of runs on the nodes of a cluster."""

ENTRIES: dict[str, dict[str, str]] = {}
"""Place of each entry, by the registry of the core and the name in it."""
