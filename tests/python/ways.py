"""What ranks can be made of, behind one interface: numpy, torch on the CPU, torch on GPUs."""

import contextlib
import gc
import itertools
import os
import sys
import traceback

import numpy as np
import pytest

import waybill

INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
TIMEOUT_S = 20.0


class NumpyWay:
    """``waybill``: ranks in host memory, numpy arrays."""

    name, device = "numpy", "cpu"
    face = waybill

    def run(self, world_size, body, **options):
        options.setdefault("timeout_s", TIMEOUT_S)
        return self.face.run_threads(world_size, body, device=self.device, **options)

    def dtype(self, name):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name, name))

    def from_bits(self, bits, dtype):
        """An array of the dtype over integers of its size."""
        return bits.view(self.dtype(dtype))

    def bits(self, array):
        """A copy in host memory, as integers of the element's size."""
        return np.array(array).view(INTEGERS[array.dtype.itemsize])


class TorchWay(NumpyWay):
    """``waybill.torch``: tensors."""

    def __init__(self, device):
        import torch

        import waybill.torch

        self.torch, self.face = torch, waybill.torch
        self.device, self.name = device, f"torch-{device}"

    def run(self, world_size, body, **options):
        if os.environ.get(PROCESSES) == self.device:
            return run_as_process(self, world_size, body, **options)
        if self.device == "cpu":
            return super().run(world_size, body, **options)
        with settled_garbage():
            return super().run(world_size, said_at_once(body), **options)

    def dtype(self, name):
        return getattr(self.torch, name)

    def from_bits(self, bits, dtype):
        # On a GPU: that of the rank's thread.
        return self.torch.from_numpy(bits).to(self.device).view(self.dtype(dtype))

    def bits(self, array):
        if array.is_cuda:  # nothing copies to pageable memory behind a kernel that waits
            self.torch.cuda.current_stream().synchronize()
        integers = getattr(self.torch, INTEGERS[array.element_size()])
        return array.detach().contiguous().view(integers).cpu().numpy().copy()


#: "cuda" or "cpu": this process is a rank of torchrun, and all of them run the same tests
#: (test_gpu_shared.py). Threads that share a GPU share a driver and its queues, too.
PROCESSES = "WAYBILL_TEST_PROCESSES"


def run_as_process(way, world_size, body, *, ranks_per_node=None, timeout_s=3 * TIMEOUT_S):
    """What run_threads returns, where this process is one of the ranks."""
    torch = way.torch
    if int(os.environ["WORLD_SIZE"]) != world_size or ranks_per_node not in (None, world_size):
        pytest.skip(f"for {world_size} ranks")
    device = way.device
    if device == "cuda":  # named: ranks may share it
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    world = way.face.World.from_process_group(device=device, timeout_s=timeout_s)
    results = [None] * world_size
    torch.distributed.all_gather_object(results, _on_host(torch, body(world)))
    return results


def _on_host(torch, value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(torch, item) for item in value)
    return value


def said_at_once(body):
    """A rank's error is printed where it happens: what it leaves on a lost GPU may end the process
    before anybody else can say so.
    """

    def one_rank(world):
        try:
            return body(world)
        except BaseException:
            print(f"rank {world.rank}:", traceback.format_exc(), file=sys.__stderr__, flush=True)
            raise

    return one_rank


@contextlib.contextmanager
def settled_garbage():
    """What is left of tests before, such as worlds in the frames of an expected error, goes before
    ranks begin, and nothing goes meanwhile: memory of a GPU that is given back waits for kernels of
    other ranks there, which wait for the rank that happens to give it back.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def captured(graph):
    """On a stream of this thread, for what this thread does alone. torch.cuda.graph also empties
    the caches of all GPUs first, also of those on which other threads capture already.
    """
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        yield
        graph.capture_end()


def random_bits(dtype_size, shape, seed):
    """Any bits."""
    high = 2 ** (8 * dtype_size - 1)
    numbers = np.random.default_rng(seed).integers(-high, high, shape)
    return numbers.astype(INTEGERS[dtype_size])


def random_plan(world_size, seed, kv_layout, scale=40):
    """Documents of uneven lengths, packed into the ranks; some ranks have little or nothing."""
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, scale, int(rng.integers(1, 4 * world_size)))]
    return waybill.plan(
        lengths, world_size, 0, kv_layout=kv_layout, block_tokens=int(rng.integers(1, 9)),
        window=int(rng.integers(1, scale)) if seed % 3 == 0 else None, imbalance_target=1.3,
    )  # fmt: skip


#: What plans break at.
PLAN_EDGES = (
    "no tokens", "rank without tokens", "one rank has all", "one token", "one document",
    "documents of one token", "exactly the maximum", "empty documents",
)  # fmt: skip


def edge_plan(world_size, edge, seed, kv_layout, scale=24):
    """A plan that has one of PLAN_EDGES."""
    rng = np.random.default_rng((seed, PLAN_EDGES.index(edge)))
    if edge == "empty documents":
        return _plan_of_empty_documents(world_size, rng, kv_layout)
    chosen, tokens_per_rank = int(rng.integers(world_size)), 0
    homes = [rng.integers(1, scale, int(rng.integers(1, 4))).tolist() for _ in range(world_size)]
    if edge == "rank without tokens":
        homes[chosen] = []
    elif edge in ("no tokens", "one rank has all", "one token"):
        held = {"no tokens": [], "one rank has all": homes[chosen], "one token": [1]}[edge]
        homes = [held if rank == chosen else [] for rank in range(world_size)]
    elif edge == "one document":
        homes = [scale * world_size - int(rng.integers(3))]  # whose rows lie on all ranks
    elif edge == "documents of one token":
        homes = [[1] * int(rng.integers(0, 9)) for _ in range(world_size)]
    elif edge == "exactly the maximum":
        homes, tokens_per_rank = [[scale - 5, 5] for _ in range(world_size)], scale
    return waybill.plan(
        homes, world_size, tokens_per_rank, kv_layout=kv_layout,
        block_tokens=int(rng.integers(1, 9)),
    )  # fmt: skip


def _plan_of_empty_documents(world_size, rng, kv_layout):
    """More documents than rows: most have no shards, most shards no tokens."""
    counts = rng.integers(0, 4, world_size)
    shards = int(counts.sum())
    ends = np.sort(rng.integers(0, shards + 1, 2 * shards + 3))
    return waybill.QkvPlan(
        world_size=world_size, rank_shard_offsets=[0, *np.cumsum(counts).tolist()],
        shard_len=(rng.integers(0, 3, shards) * rng.integers(0, 2, shards)).tolist(),
        q_dst=rng.integers(0, world_size, shards).tolist(),
        doc_shard_offsets=[0, *ends.tolist(), shards], doc_shards=rng.permutation(shards).tolist(),
        kv_layout=kv_layout,
    )  # fmt: skip


def rows_of(plan):
    """Rows of each rank in the MLP layout."""
    plan = plan.to_qkv_plan() if isinstance(plan, waybill.AttentionPlan) else plan
    offsets = plan.rank_shard_offsets
    return [int(plan.shard_len[a:b].sum()) for a, b in itertools.pairwise(offsets)]


def simulated(tensors, metadata):
    """What the simulation delivers to each rank, in integers."""
    return [np.asarray(rows) for rows in waybill.simulate_communication(tensors, metadata)]


def simulated_sums(gradients, metadata, rows):
    """Gradients of copies into planes, and their sums, by rank."""
    sums = []
    copies = metadata.rev_kv.seq_recv_mask.shape[2]
    world, hidden = len(gradients), gradients[0].shape[1]
    given = np.zeros((world, max(map(len, gradients)), hidden), gradients[0].dtype)
    for rank, gradient in enumerate(gradients):
        given[rank, : len(gradient)] = gradient
    planes = np.zeros((world, copies * max(rows), hidden), given.dtype)
    waybill.orchestrate_simulate(given, planes, metadata.rev_kv)
    for rank in range(world):
        whole = planes[rank, : copies * rows[rank]]
        sums.append(waybill.sum_kv_copies(whole, metadata.rev_kv, rank))
    return sums
