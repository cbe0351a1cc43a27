"""Make, index, verify and convert shards of tokens; inspect the data of recipes and runs."""

from torchtitan.tools.data import (
    convert_tokens,
    index_tokens,
    inspect_samples,
    run_ledger,
    tokenize_text,
)
from torchtitan.tools.options import RecipeVerb, Verb, verb

app = verb(help=__doc__)

app.command("tokenize", cls=Verb)(tokenize_text.tokenize_text)
app.command("index", cls=Verb)(index_tokens.index)
app.command("verify", cls=Verb)(index_tokens.verify)
app.command("inspect", cls=RecipeVerb)(inspect_samples.inspect_samples)
app.command("ledger", cls=Verb)(run_ledger.ledger)
app.command("convert", cls=Verb)(convert_tokens.convert)
