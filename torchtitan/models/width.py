"""Settings that carry over from a narrow decoder to a wide one: muP (Yang et al., 2022, Tensor
Programs V, arXiv:2203.03466, table 8), relative to a base model.

The base has the same settings, with `dim = base_width` and all other widths in proportion: of
feed-forwards, experts and all heads together. If `head_dim` is set, it has fewer heads of this
size; else as many, narrower ones. Latent vectors, the number of experts and the vocabulary do not
grow. With m the ratio of the widths, and lr the recipe's learning rate:

    parameters                     deviation    AdamW     SGD
    embedding, output, vectors     1            lr        lr m
    matrices                       1/sqrt(m)    lr / m    lr
    from features to what does
    not grow, such as a router     1/m          lr / m    lr / m

Logits of the output are divided by m, which is also right if it is the embedding, and those of
attention by sqrt(m) once more if heads grow. Embeddings that are scaled by sqrt(dim) are scaled by
sqrt(base_width). The rates are in `UpdateRule.width_factor`. Of m = 1, all is as without a base.
"""

from torch import Tensor

from torchtitan.models.decoder import DecoderArgs

MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "project", "predict")


def growth(args: DecoderArgs, name: str) -> tuple[float, float]:
    """Return the growth of a parameter's inputs and outputs; see `ModelSpec.growth`."""
    wider, (*_, module, last) = args.growth, ("", *name.split("."))
    if module == "router":
        return (1.0 if last == "logit_bias" else wider), 1.0
    if module == "sinks":
        return 1.0, 1.0
    if module in ("q_norm", "k_norm") and not args.joint_norms:
        return 1.0, args.head_growth
    is_matrix = last == "weight" if module in MATRICES else f"{module}.{last[0]}" == "experts.w"
    return (wider if is_matrix else 1.0), wider


def without_base(args: DecoderArgs, name: str, weight: Tensor) -> Tensor:
    """Fold factors of logits and embeddings into a weight; see `ModelSpec.without_base`."""
    of_queries = "q_norm.weight" if args.head_norms or args.joint_norms else "wq."
    of_embedding = args.growth**-0.5 if args.scaled_embeddings else 1.0
    factor = 1.0
    if name == "norm.weight":
        factor = 1 / args.growth / (of_embedding if args.tied else 1.0)
    elif name == "tok_embeddings.weight":
        factor = of_embedding
    elif f".attention.{of_queries}" in name:
        factor = args.head_growth**-0.5
    offset = int(args.norm == "offset" and name.endswith("norm.weight"))
    return weight if factor == 1 else (weight + offset) * factor - offset
