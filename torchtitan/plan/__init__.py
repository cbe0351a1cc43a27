"""Plans of a run before it starts: the memory, the traffic and the time of a step.

recording, fake_rank   a step of one rank, run on fake tensors: kernels, messages, allocations
cuda_operators, compiled, fusion   the operators and the compiled graphs of a CUDA device
expansion              the whole step, from a recording of its repeated parts
allocator              memory that the caching allocator reserves
hardware, kernel_time, message_time   devices and links, and the time of a kernel or a collective
device_streams, speed  the time of a step: streams, exposed communication, the pipeline
plan, changes          all of it together, and the changes that make a run fit
fitting                whether a run fits in this machine, in the words of other verbs
report                 the verb `plan`
"""

ENTRIES = {
    "check": {"plan": "planned_memory:PlannedMemory"},
    "comparison": {"plan": "comparison:compared_plan"},
    "verb.Recipes": {"plan": "report.command:app"},
}
"""Place of each entry, by the registry of the core and the name in it."""
