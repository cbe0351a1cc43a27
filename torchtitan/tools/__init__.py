"""Tools for runs and recipes: the verbs of the `torchtitan` command, a file or folder each."""
