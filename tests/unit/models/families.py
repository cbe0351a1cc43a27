"""What the tests of all families do: draw a network, and compare it with that of transformers."""

import json
from collections import defaultdict
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tables import table
from torchtitan.config import RecipeError
from torchtitan.models import MODELS
from torchtitan.models.experts import idle_parameters
from torchtitan.models.spec import MinShape, build_empty, count_parameters, initialize
from torchtitan.tools.generate import cached

BAD_CONFIGS = Path(__file__).with_name("bad_configs.txt")
CONFIGS = Path(__file__).parents[2] / "data/published"


KEYS = {"dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
KEYS |= {"kv": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size"}


def published(*names, **sizes):
    """What matters of the config.json of a published model: what some have in common, and sizes."""
    config = {}
    for name in names:
        config |= json.loads((CONFIGS / f"{name}.json").read_text())
    return config | {KEYS.get(key, key): value for key, value in sizes.items()}


FLAVORS = defaultdict(dict)
"""Of a family, the published config.json of each size, its parameters, and those a token uses."""
for family, flavor, sizes, total, active in table(__file__, "published.txt"):
    FLAVORS[family][flavor] = published(family, **json.loads(sizes)), int(total), int(active)


def drawn(spec, args, seq_len=64, std=0.1, of_norms=1.0):
    """A network far from its start: attention is not uniform, and norms and biases matter."""
    model = spec.build(args, seq_len)
    initialize(model.named_parameters(), lambda name: of_norms if "norm" in name else std, seed=0)
    return model


def to_transformers(spec, args, named):
    """Weights or gradients under the names of transformers 5, which fuses experts in memory."""
    written, result = spec.formats["hf"], dict[str, Tensor]()
    for name, value in named:
        theirs, rows, share = written.name(name), written.rows(args, name), written.share(name)
        theirs = theirs.replace(".block_sparse_moe.", ".mlp.")  # as files have it
        stem, of_each, _ = theirs.partition(".experts.*.")
        if share is not None:
            whole = result.setdefault(theirs, torch.empty(share.whole(value.shape)))
            share.of(whole).copy_(value)
        elif of_each:
            key = stem + (".experts.down_proj" if name.endswith("w2") else ".experts.gate_up_proj")
            before = result.get(key, value[:, :0])
            result[key] = torch.cat((before, value), dim=1)  # w1, then w3: our order
        else:
            result[theirs] = value if rows is None else value[rows.argsort()]
    return result


def of_transformers(config):
    """The network of transformers that a config.json describes."""
    import transformers

    network = getattr(transformers, config["architectures"][0])
    about = network.config_class(**deepcopy({**config}), attn_implementation="eager")
    return network(about)


def equals_transformers(spec, args, model=None, seq_len=64):
    """Logits are those of transformers to 1e-5, and so are all gradients."""
    ours = model or drawn(spec, args, seq_len)
    theirs = of_transformers(spec.formats["hf"].config(args, None)).float()
    weights = to_transformers(spec, args, ours.state_dict().items())
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if args.tied else [], [])
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(args.vocab_size, (2, seq_len), generator=generator)
    logits, expected = ours(inputs), theirs(inputs, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    for out in (logits, expected):
        F.cross_entropy(out.flatten(0, 1), inputs.roll(-1, dims=1).flatten()).backward()
    named = [(name, p.grad) for name, p in ours.named_parameters() if p.grad is not None]
    gradients = to_transformers(spec, args, named)
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    torch.testing.assert_close(gradients, wanted, atol=1e-6, rtol=1e-4)


def has_published_sizes(family, flavor):
    """A flavor has the parameters of transformers' network, of which a token uses so many."""
    spec, (config, total, active) = MODELS[family], FLAVORS[family][flavor]
    args = spec.flavors[flavor]
    assert spec.formats["hf"].args(config) == args
    ours = build_empty(spec.build, args, 16)
    assert count_parameters(ours).total == total
    assert total - idle_parameters(ours) == active
    with torch.device("meta"):
        theirs = of_transformers(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == total
    return args, config, spec.formats["hf"].config(args, None)


def shrunk(spec, large, tp):
    """A small network like a large one, whose sizes fit."""
    small = spec.shrink(large, MinShape(n_layers=3, tensor_ranks=tp, vocab_size=320))
    assert not [*spec.settings().size_problems(small)]
    assert count_parameters(build_empty(spec.build, small, 16)).total < 3e6
    return small


def continues_a_text(model, seq_len=64):
    """Parts of a text, one after the other, have the logits of the whole."""
    tokens, parts = torch.arange(seq_len)[None], []
    with torch.no_grad(), cached(model, seq_len) as cache:
        for start, end in ((0, 20), (20, 21), (21, seq_len)):
            positions = torch.arange(start, end)[None]
            cache.move_to(positions, end)
            parts.append(model(tokens[:, start:end], positions))
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=1e-5, rtol=0)


def lines(call, *arguments):
    """What a refusal says; nothing if there is none."""
    try:
        call(*arguments)
    except RecipeError as error:
        return error.lines
    return []


def refuses_bad_configs(read, name, config):
    """Each change of a published config.json in `bad_configs.txt` is refused as it says there."""
    sections = BAD_CONFIGS.read_text().split("\n=== ")
    (section,) = (text for text in sections if text.startswith(f"{name}\n"))
    for case in section.strip().split("\n\n")[1:]:
        change, *told = case.split("\n> ")
        assert lines(read, config | json.loads(change)) == told, change
