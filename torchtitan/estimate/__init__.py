"""Estimates of a run's cost before it starts: the memory of a rank, and the traffic of a step.

Each technique supplies its own formulas as methods (`ShardingConfig.memory` and `messages`,
`ReplicasConfig.messages`, `OptimizerConfig.sent_bytes`), given the work of a rank
(`torchtitan.parallel.work`). They are added up here, over a layout and the order of its pipeline.
"""
