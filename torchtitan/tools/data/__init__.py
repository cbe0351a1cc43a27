"""Make, index and verify shards of tokens; inspect the data of recipes and runs."""

from torchtitan.tools.data import index_shards, inspect, ledger, tokenize
from torchtitan.tools.options import RecipeVerb, Verb, verb

app = verb(help=__doc__)

app.command("tokenize", cls=Verb)(tokenize.tokenize_text)
app.command("index", cls=Verb)(index_shards.index)
app.command("verify", cls=Verb)(index_shards.verify)
app.command("inspect", cls=RecipeVerb)(inspect.inspect_samples)
app.command("ledger", cls=Verb)(ledger.ledger)
