"""The verbs of `torchtitan data`, a module each."""
