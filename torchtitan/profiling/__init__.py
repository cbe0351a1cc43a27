"""Traces of where the time goes and snapshots of where the memory goes, on a schedule, when asked
for, and when memory runs out."""

from torchtitan.profiling.out_of_memory import Evidence
from torchtitan.profiling.profiler import ON_REQUEST, REQUEST_FILE, Profiler
from torchtitan.profiling.settings import ProfilingConfig
