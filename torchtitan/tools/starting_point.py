"""The start of a run, as `check` tells it: it imports what a run does, so only if asked."""

from torchtitan import config
from torchtitan.build import resume_policy
from torchtitan.checkpoint import saved_steps
from torchtitan.config import ConfigError, Problem
from torchtitan.job import JobConfig


def starting_point(found: config.Recipe[JobConfig], here: bool) -> list[str]:
    """Describe the checkpoint a run starts from, if any; refuse one that does not fit.

    Checkpoints of the run itself count if it is to run `here`.
    """
    policy, checkpoint = resume_policy(found.config), found.config.checkpoint
    path, has_frequent = checkpoint.initial_load_path, here and checkpoint.frequent.interval
    not_looked_for = "frequent checkpoint, which is not looked for here"
    if (
        has_frequent
        and checkpoint.resume == "must"
        and not saved_steps(checkpoint.path_in(policy.dump_folder))
    ):
        return [f"is refused unless nodes hold a {not_looked_for}"]
    if here:
        start = policy.start()
    elif path is None:
        return []
    else:
        try:
            start = policy.initial()
        except ConfigError as error:
            found.refuse([Problem("checkpoint.initial_load_path", str(error))])
            raise
    also = [f"unless nodes hold a newer {not_looked_for}"] * bool(has_frequent)
    if start.path is None:
        return ["starts from scratch", *also]
    what = "starts from the weights in" if start.model_only else "resumes from"
    return [f"{what} {start.path}", *start.changes, *filter(None, [start.rate]), *also]
