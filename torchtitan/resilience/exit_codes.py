"""Exit codes of commands, and the page of the documentation that lists them."""

from enum import IntEnum

from torchtitan.config import docstrings


class ExitCode(IntEnum):
    """Each with what it means for a run | what a scheduler should do | for another command."""

    FINISHED = 0
    """The run finished, or Ctrl-C stopped it and it saved. | do nothing | The command succeeded; a
    comparison or verification found no difference. Also `plan`, if the recipe does not fit."""
    FAILED = 1
    """The run failed after all allowed restarts, or was stopped with `checkpoint.enable = false`
    and saved nothing. | report it | The command found a difference or damage
    (`verify-parallelism`, `verify-resume`, `checkpoint verify`, `checkpoint diff`, `data verify`,
    `data ledger`), a slow or broken rank (`preflight`), or a failed run (`compare`); something
    could not be reached, or a running job did not answer (`profile`)."""
    WRONG_RECIPE = 2
    """The recipe or the command is wrong: the message names the mistake and the fix. | report it |
    The recipe, a file or an option is wrong: for `plan`, also unknown hardware, or an unusable
    number of ranks."""
    DIVERGED = 3
    """The run diverged: too many [skipped steps](spikes.md) in a row. It saved the state before
    them. | report it; a restart repeats the same steps"""
    REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: try again later
    """SIGTERM, SIGUSR1 or SIGHUP stopped the run, and it saved. | start the same command again"""
    SIGNALED = 128
    """Signal n ended the run immediately: a second signal while it was stopping, or a signal to a
    single process before its first step. | treat it as a failure | Signal n ended the command
    (Ctrl-C: 130); `compare` continues if you run it again."""


def page() -> str:
    """Return the page in Markdown."""
    rows = "\n".join(
        f"| {code}{' + n' * (code is ExitCode.SIGNALED)} | {docstrings(ExitCode)[code.name]} |"
        for code in ExitCode
    )
    return f"""# Exit codes

| code | a run | a scheduler should | another command |
|---|---|---|---|
{rows}

The launcher and `run_train.sh` exit as `torchtitan train` does. The launcher restarts ranks itself,
except after 2 and 3. Ranks that torchrun started exit with 0 after they were stopped, because
torchrun restarts them after any other code.

Results are written to standard output, and logs and error messages to standard error.
"""
