"""A Llama and its training written out in plain PyTorch: what the real run is compared with.

    python -m benchmarks.real_run.by_hand SETTINGS.json BATCHES.npy

The same sizes, batches, learning rates and AdamW as the run, from initial weights of its own; no
code of the trainer. The driver writes the settings, and the batches: (steps, sequences, length + 1)
token ids. Prints the losses and seconds of the steps as JSON.
"""

import json
import math
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, s: dict) -> None:
        super().__init__()
        dim, ffn_dim, eps = s["dim"], s["ffn_dim"], s["norm_eps"]
        self.heads, self.kv_heads, self.size = s["n_heads"], s["n_kv_heads"], dim // s["n_heads"]
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, self.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(dim, self.kv_heads * self.size, bias=False)
        self.w1, self.w2 = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor, count: int) -> Tensor:
            return y.unflatten(-1, (count, self.size)).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            one, two = y.chunk(2, dim=-1)
            return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

        y = self.attention_norm(x)
        q, k = heads(self.wq(y), self.heads), heads(self.wk(y), self.kv_heads)
        v = heads(self.wv(y), self.kv_heads)
        causal = {"is_causal": True, "enable_gqa": True}
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, **causal)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """With tied embeddings, as the run's."""

    def __init__(self, s: dict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s["vocab_size"], s["dim"])
        self.blocks = nn.ModuleList(Block(s) for _ in range(s["n_layers"]))
        self.norm = nn.RMSNorm(s["dim"], s["norm_eps"])
        size = s["dim"] // s["n_heads"]
        steps = s["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(s["seq_len"]), steps)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for name, parameter in self.named_parameters():
            ends = name.endswith(("wo.weight", "w2.weight"))
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * s["n_layers"] if ends else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding.weight)


def train(s: dict, batches: np.ndarray) -> tuple[list[float], list[float]]:
    """Losses and seconds of the steps."""
    torch.manual_seed(s["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama(s).to(device)
    settings = {"betas": (s["beta1"], s["beta2"]), "weight_decay": s["weight_decay"]}
    optimizer = torch.optim.AdamW(model.parameters(), eps=s["eps"], fused=True, **settings)
    losses, seconds = [], []
    for batch, rate in zip(batches, s["rates"], strict=True):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for sequences in np.split(batch, s["accumulated"]):
            tokens = torch.from_numpy(sequences.astype(np.int64)).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / s["accumulated"]).backward()
            total += loss.item() / s["accumulated"]
        nn.utils.clip_grad_norm_(model.parameters(), s["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    losses, seconds = train(settings, np.load(sys.argv[2]))
    print(json.dumps({"losses": losses, "seconds": seconds}))
