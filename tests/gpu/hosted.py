"""Collectives for ranks that share one GPU: NCCL refuses two ranks on a device."""

import os
import tempfile
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan import local_ranks

NAME = "hosted"


class HostedWork(dist._Work):
    """A collective that gloo was given; `after` copies what came to where it belongs."""

    def __init__(self, work, after, result):
        super().__init__()
        self.work, self.after, self.result_of, self.done = work, after, result, False

    def wait(self, timeout=timedelta(0)):
        if not self.done:
            self.work.wait()
            self.after()
            self.done = True
        return True

    def is_completed(self):
        return self.done or bool(self.work.is_completed())

    def result(self):
        self.wait()
        return self.result_of

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(self.result_of)
        return future


class HostedGroup(dist.ProcessGroup):
    """A process group whose tensors may be on any device. Shapes are those of torch's methods."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.named = self.described = ""
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return NAME

    def setGroupName(self, name):
        self.named = name

    def getGroupName(self):
        return self.named

    def setGroupDesc(self, description):
        self.described = description

    def getGroupDesc(self):
        return self.described

    def _send(self, given):
        return [tensor.detach().cpu().contiguous() for tensor in given]

    def _room(self, wanted):
        return [torch.empty(t.shape, dtype=t.dtype) for t in wanted]

    def _work(self, work, wanted, came):
        def copy():
            for to, value in zip(wanted, came, strict=True):
                to.detach().copy_(value)

        return HostedWork(work, copy, list(wanted))

    def _now(self, work, wanted, came):
        """A collective is over when it is called: the ranks share the device anyway."""
        hosted = self._work(work, wanted, came)
        hosted.wait()
        return hosted

    def broadcast(self, tensors, opts=None):
        host = self._send(tensors)
        return self._now(self.gloo.broadcast(host, opts or dist.BroadcastOptions()), tensors, host)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        host, mean = self._send(tensors), opts.reduceOp == dist.ReduceOp.AVG
        if mean:  # which gloo does not know
            opts.reduceOp = dist.ReduceOp.SUM
        work = self._now(self.gloo.allreduce(host, opts), tensors, host)
        if mean:
            for tensor in tensors:
                tensor.detach().div_(self.size())
        return work

    def allreduce_coalesced(self, tensors, opts=None):
        each = dist.AllreduceOptions()
        if opts is not None:
            each.reduceOp = opts.reduceOp
        return [self.allreduce([tensor], each) for tensor in tensors][-1]

    def allgather(self, outputs, inputs, opts=None):
        host, rooms = self._send(inputs), [self._room(wanted) for wanted in outputs]
        work = self.gloo.allgather(rooms, host)
        return self._now(work, *(list(chain(*lists)) for lists in (outputs, rooms)))

    def all_gather_single(self, output, given, opts=None):
        (host,), room = self._send([given]), torch.empty(output.shape, dtype=output.dtype)
        parts = list(room.view(-1).chunk(self.size()))
        return self._now(self.gloo.allgather([parts], [host.view(-1)]), [output], [room])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return [self.all_gather_single(output, given) for output, given in pairs][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None):
        ((output,), (parts,)) = outputs, inputs
        return self.reduce_scatter_single(output, torch.cat([p.reshape(-1) for p in parts]), opts)

    def reduce_scatter_single(self, output, given, opts=None):
        # As an all-reduce: gloo of torch 2.11 has no other for all dtypes.
        (whole,) = self._send([given])
        each = dist.AllreduceOptions()
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        if opts is not None and not mean:
            each.reduceOp = opts.reduceOp
        work = self.gloo.allreduce([whole], each)
        own = whole.view(self.size(), *output.shape)[self.rank()]
        done = self._now(work, [output], [own])
        if mean:
            output.detach().div_(self.size())
        return done

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(output, given, opts) for output, given in pairs][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output, given, output_sizes, input_sizes, opts=None):
        (host,), (room,) = self._send([given]), self._room([output])
        work = self.gloo.alltoall_base(
            room, host, output_sizes, input_sizes, dist.AllToAllOptions()
        )
        return self._now(work, [output], [room])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=None):
        host, rooms = self._send(inputs), self._room(outputs)
        return self._now(self.gloo.alltoall(rooms, host), outputs, rooms)

    def scatter(self, outputs, inputs, opts=None):
        host, rooms = [self._send(parts) for parts in inputs], self._room(outputs)
        return self._now(self.gloo.scatter(rooms, host, opts), outputs, rooms)

    def gather(self, outputs, inputs, opts=None):
        host, rooms = self._send(inputs), [self._room(wanted) for wanted in outputs]
        work = self.gloo.gather(rooms, host, opts)
        return self._now(work, *(list(chain(*lists)) for lists in (outputs, rooms)))

    def send(self, tensors, to, tag=0):
        # Waited for later: two ranks that send to each other would wait for ever.
        host = self._send(tensors)
        return self._work(self.gloo.send(host, to, tag), (), ())

    def recv(self, tensors, source, tag=0):
        rooms = self._room(tensors)
        return self._work(self.gloo.recv(rooms, source, tag), tensors, rooms)

    def barrier(self, opts=None):
        return self._now(self.gloo.barrier(), (), ())


def register():
    """Let `init_process_group("hosted")` make such groups, in this process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, HostedGroup, devices=["cpu", "cuda"])


def run_ranks(function, ranks, kind, *arguments):
    """`function(*arguments)` on ranks that share the first device of that kind; results in order.

    The parent must not have used CUDA.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / NAME)
        return local_ranks.run_ranks(_share, ranks, store, kind, function, arguments)


def _share(store, kind, function, arguments):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # A rank that left the group while another still connects to it would fail it.
    dist.destroy_process_group()
    register()
    dist.init_process_group(
        NAME,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=100),
    )
    os.environ["LOCAL_RANK"] = "0"
    if kind == "cuda":
        torch.cuda.set_device(0)
        _share_memory(size)
    return function(*arguments)


def _share_memory(size):
    """Let symmetric memory meet through a group of gloo: it asks its group for the store, which a
    group written in Python does not have.
    """
    from torch.distributed import _symmetric_memory

    other = dist.new_group(list(range(size)), backend="gloo").group_name
    _symmetric_memory.enable_symm_mem_for_group(other)
    workspace = _symmetric_memory.get_symm_mem_workspace

    def shared(name, min_size):
        return workspace(other, min_size)

    _symmetric_memory.get_symm_mem_workspace = shared
