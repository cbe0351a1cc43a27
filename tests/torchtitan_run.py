"""A run as TorchTitan makes and saves it: a bare loop with torch's own parts, on one rank."""

import math
import pickle
import re
import warnings

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter, state_dict

from torchtitan.inputs import open_stream, open_task
from torchtitan.models import MODELS
from torchtitan.models.decoder import Decoder
from torchtitan.parallel import Degrees

FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)


class TorchTitanRun:
    """Trains what a recipe describes, and saves as TorchTitan does."""

    def __init__(self, job):
        self.job = job
        torch.manual_seed(42)
        self.model = Decoder(job.model_args(), job.training.seq_len)
        for parameter in self.model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        o = job.optimizer
        kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[o.name]
        self.optimizer = kind(
            self.model.parameters(),
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rule(job))
        self.batches = samples(job)
        self.step = self.tokens = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            batch = next(self.batches)
            self.optimizer.zero_grad()
            logits = self.model(batch.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.training.max_norm)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            self.tokens += batch.targets.numel()
            losses.append(loss.item())
        return losses

    def state(self):
        """What TorchTitan v0.2 saves, by its names."""
        schedule = self.schedule.state_dict()
        del schedule["lr_lambdas"]
        states = state_dict.get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {
            **state_dict.get_model_state_dict(self.model),
            **{f"optimizer.{name}": value for name, value in states.items()},
            **{f"lr_scheduler.{name}": value for name, value in schedule.items()},
            "train_state.step": self.step,
            "train_state.ntokens_seen": self.tokens,
            "dataloader.dp_rank_0": pickle.dumps({"tokens": [1, 2, 3]}),
            "dataloader.world_size": 1,
        }


def save(folder, state):
    """Write what `TorchTitanRun.state` gave, or something like it, into `folder`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        # The names are flattened already, so that values stay what they are.
        dcp.save(state, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False))
    return folder


def samples(job):
    """The global batches of the recipe's data, in order."""
    whole = {"local_batch_size": job.training.global_batch_size}
    job = job.model_copy(update={"training": job.training.model_copy(update=whole)})
    return iter(open_stream(job, open_task(job), Degrees(), rank=0))


def rule(job):
    """The factor of the learning rate after `done` steps: warm-up, stable, decay."""
    config, steps = job.lr_scheduler, job.schedule_steps()
    warmup = config.warmup_steps
    decay = steps - warmup if config.decay_ratio is None else round(steps * config.decay_ratio)
    shapes = {
        "linear": lambda t: 1 - t,
        "sqrt": lambda t: 1 - math.sqrt(t),
        "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    }

    def factor(done):
        if done < warmup:
            return (done + 1) / warmup
        if done < steps - decay:
            return 1.0
        shape = shapes[config.decay_type](min((done - (steps - decay)) / decay, 1.0))
        return config.min_lr_factor + (1 - config.min_lr_factor) * shape

    return factor


def as_v01(state):
    """What TorchTitan v0.1 saves: the schedule and the counters are one value each."""
    old = {}
    for name, value in state.items():
        part, _, key = name.partition(".")
        if part in ("lr_scheduler", "train_state"):
            old.setdefault(part, {})[key] = value
        else:
            old[name] = value
    return old


def as_v03(state):
    """What TorchTitan v0.3 saves: other names, and queries, keys and values with one moment."""
    new = {}
    for name, value in state.items():
        name = re.sub(r"\boutput\.weight", "lm_head.weight", name)
        if not name.startswith("optimizer."):
            name = re.sub(r"attention\.(w[qkv])\.", r"attention.qkv_linear.\1.", name)
        elif found := re.search(r"attention\.(w[qkv])\.", name):
            fused = name.replace(found[0], "attention.qkv_linear.wqkv.")
            is_later = isinstance(value, torch.Tensor) and value.ndim and fused in new
            new[fused] = torch.cat([new[fused], value]) if is_later else value
            continue
        new[name] = value
    return new


def weights_only(state):
    """What `last_save_model_only` leaves, in bfloat16."""
    parts = ("optimizer", "lr_scheduler", "train_state", "dataloader")
    return {n: v.bfloat16() for n, v in state.items() if n.partition(".")[0] not in parts}


def save_for_hugging_face(run, folder, *, whole):
    """What `last_save_in_hf` leaves: safetensors under other names, and no config.json."""
    spec, args = MODELS[run.job.model.name], run.job.model_args()
    names, rows = spec.formats["hf"].name, spec.formats["hf"].rows
    state = {}
    for name, weight in state_dict.get_model_state_dict(run.model).items():
        order = rows(args, name)
        state[names(name)] = weight if order is None else weight[order.argsort()].contiguous()
    save_safetensors(folder, state, whole=whole)


def save_safetensors(folder, state, *, whole):
    """Write tensors with torch's writer of safetensors, into two files."""
    files = {name: 1 + number % 2 for number, name in enumerate(state)}
    writer = HuggingFaceStorageWriter(
        str(folder), files, save_distributed=True, enable_consolidation=whole
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, storage_writer=writer)
