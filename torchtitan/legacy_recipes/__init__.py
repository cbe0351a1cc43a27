"""Recipes written for TorchTitan v0.1 and v0.2: what moved, and what has no counterpart.

One table maps every key of theirs that is not ours. A key that moved is read under its new name,
with a notice. A key without a counterpart is dropped, with a notice, where its feature is off;
otherwise it is refused, with what to write instead. What such a recipe does not say is TorchTitan's
default (`unsaid`). `torchtitan migrate` writes the same translation into a file.
"""

from torchtitan.legacy_recipes.reading import gather
from torchtitan.legacy_recipes.table import TABLE
from torchtitan.legacy_recipes.translating import entry
from torchtitan.legacy_recipes.translations import Converted, Gone, Kept, Moved, Together

__all__ = ["TABLE", "Converted", "Gone", "Kept", "Moved", "Together", "entry", "gather"]
