"""Plans of a run before it starts: the memory, the traffic and the time of a step.

recording, fake_rank, shortening   a step of one rank, run on fake tensors
cuda_operators, compiled, fusion   the operators and the compiled graphs of a CUDA device
expansion              the whole step, from a recording of its repeated parts
memory                 what the caching allocator and libraries take
hardware, kernel_time, messages    devices and links, and the time of a kernel or a collective
device_streams, speed  the time of a step: streams, exposed communication, the pipeline
plan                   all of it together
fitting                whether a run fits in this machine, and the changes that make it fit
layouts, search        the layouts of a recipe, and the fastest that fits
comparison             the plan next to what was measured
command, plan_report, search_report, page   the verb `plan`
"""

ENTRIES = {
    "check": {"plan": "fitting:PlannedMemory"},
    "hardware": {"plan": "hardware:problems_of"},
    "comparison": {"plan": "comparison:compared_plan"},
    "verb.Recipes": {"plan": "command:app"},
}
"""Place of each entry, by the registry of the core and the name in it."""
