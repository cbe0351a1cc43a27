"""Plans of a run before it starts: the memory, the traffic and the time of a step."""

ENTRIES = {
    "check": {"plan": "planned_memory:PlannedMemory"},
}
"""Place of each entry, by the registry of the core and the name in it."""
