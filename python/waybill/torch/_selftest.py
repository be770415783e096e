"""The checks of ``python -m waybill selftest`` that need torch, and those that need GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Tuple

import numpy as np
import torch

from .._selftest import (
    HIDDEN,
    LENGTHS,
    TIMEOUT_S,
    Check,
    expect,
    expected_rows,
    payloads,
    planned,
    run_golden,
)
from ..moe import simulate_dispatch
from ..world import World, num_gpus
from .attention.module import ContextParallelAttention
from .functions import metadata_of, orchestrate_simulate
from .kernels import AttentionShape, Sequences
from .moe import EPAll2AllLayer, EPConfig
from .world import run_threads

_TOKENS, _EXPERTS, _TOPK, _MAX = (5, 0, 7, 3), 8, 2, 8
_MOST_GPUS = 8


def golden() -> str:
    """The recorded cases with tensors for arrays."""
    face = sys.modules["waybill.torch"]
    return run_golden(face, lambda array: torch.from_numpy(np.array(array)))


def check_attention() -> str:
    """ContextParallelAttention forward and backward against whole documents."""
    for per_node in (4, 2):
        _attention("cpu", 4, per_node)
    return "4 ranks on 1 and on 2 nodes: equal to whole documents"


def check_layer() -> str:
    """EPAll2AllLayer against its simulation, and its gradients."""
    for per_node in (4, 2):
        _layer("cpu", 4, per_node)
    return "4 ranks on 1 and on 2 nodes: equal to the simulation"


def check_gpu_simulation() -> str:
    """orchestrate_simulate moves rows on the device."""
    made = planned(4)
    metadata = made.to_metadata()
    rows = payloads(made, 4, 0)
    want = expected_rows(rows, metadata.fwd_q)
    source = torch.zeros(4, max(map(len, rows)), HIDDEN)
    for rank, values in enumerate(rows):
        source[rank, : len(values)] = torch.from_numpy(values)
    output = torch.zeros(4, max(map(len, want)), HIDDEN, device="cuda")
    table = metadata_of(metadata.fwd_q)
    moved = orchestrate_simulate(source.cuda(), output, table).cpu().numpy()
    for rank, values in enumerate(want):
        expect((moved[rank, : len(values)] == values).all(), f"rank {rank}: rows differ")
    return torch.cuda.get_device_name()


def _on_gpus(check: Callable[..., None]) -> str:
    """Autograd has one thread a GPU: ranks that share one go forward only."""
    gpus = min(num_gpus(), _MOST_GPUS)
    ranks = max(2, gpus)
    check("cuda", ranks, ranks, backward=gpus == ranks)
    both = "forward and backward" if gpus == ranks else "forward"
    return f"{ranks} ranks on {gpus} GPUs, {both}: equal to what was expected"


def _sums_so_far(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, shape: AttentionShape
) -> torch.Tensor:
    """A kernel of exact results: each query and the sum of all K and V that it sees."""
    keys = torch.split(k + v, list(sequences.k_lens))
    return q + torch.cat([t.cumsum(0)[len(t) - n :] for t, n in zip(keys, sequences.q_lens)])


def _attention(device: str, world_size: int, per_node: int, backward: bool = True) -> None:
    made = planned(world_size)
    given = [payloads(made, world_size, kind) for kind in range(4)]  # q, k, v, gradient
    q, k, v, gradient = (np.split(np.concatenate(t), np.cumsum(LENGTHS)[:-1]) for t in given)
    out = [q_ + (k_ + v_).cumsum(0) for q_, k_, v_ in zip(q, k, v)]
    of_keys = [g[::-1].cumsum(0)[::-1] for g in gradient]

    def body(world: World) -> Tuple[Any, ...]:
        mine = [torch.from_numpy(t[world.rank][:, None]).to(world.device) for t in given]
        leaves = [t.requires_grad_(backward) for t in mine[:3]]
        attention = ContextParallelAttention(
            world, 1, 1, HIDDEN, dtype=torch.float32, kernel=_sums_so_far, in_place=True
        )
        plan = attention.plan(made)
        attention.prepare(plan)
        result = attention(plan, leaves[0], leaves[1], leaves[2])
        if backward:
            torch.autograd.backward([result], [mine[3]])
        found = _arrays(result, *(t.grad for t in leaves))
        attention.close()
        return found

    results = run_threads(
        world_size, body, device=device, ranks_per_node=per_node, timeout_s=TIMEOUT_S
    )
    names = ("output", "gradient of Q", "gradient of K", "gradient of V")
    for name, *ranks, whole in zip(names, *results, (out, gradient, of_keys, of_keys)):
        if ranks[0] is not None:
            got, want = (np.concatenate(parts) for parts in (ranks, whole))
            expect(_same(got[:, 0], want), f"{world_size} ranks on {device}: {name} differs")


def _layer(device: str, world_size: int, per_node: int, backward: bool = True) -> None:
    counts = [_TOKENS[rank % len(_TOKENS)] for rank in range(world_size)]
    experts = _EXPERTS * world_size // 4 if world_size % 4 == 0 else 2 * world_size
    random = np.random.default_rng(4)
    tokens = [random.integers(1, 9, (n, HIDDEN)).astype(np.float32) for n in counts]
    ids = [random.integers(0, experts, (n, _TOPK)) for n in counts]
    weights = [random.random((n, _TOPK)).astype(np.float32) for n in counts]
    sizes = (_MAX, HIDDEN, _TOPK, experts)
    config = EPConfig(*sizes, 0, world_size, per_node, "float32")
    want = simulate_dispatch(config, tokens, ids, weights)
    want_sums = want.combine([2 * rows for rows in want.recv_tokens])

    def body(world: World) -> Tuple[Any, ...]:
        layer = EPAll2AllLayer(
            world, *sizes[:3], world.rank, experts, per_node, world_size, torch.float32
        )
        given = [torch.from_numpy(t[world.rank]).to(world.device) for t in (tokens, ids, weights)]
        given[0].requires_grad_(backward)
        rows, row_weights, layout = layer.dispatch(*given)
        sums = layer.combine(2 * rows, layout)
        if backward:
            torch.autograd.backward([sums], [torch.ones_like(sums)])
        layer.synchronize()
        found = _arrays(rows, row_weights, sums, given[0].grad)
        layer.finalize()
        return found

    results = run_threads(
        world_size, body, device=device, ranks_per_node=per_node, timeout_s=TIMEOUT_S
    )
    assert want.recv_weights is not None
    for rank, result in enumerate(results):
        gradient = np.full((counts[rank], HIDDEN), 2.0 * _TOPK, np.float32)
        wanted = (want.recv_tokens[rank], want.recv_weights[rank], want_sums[rank], gradient)
        for name, got, expected in zip(("rows", "weights", "sums", "gradient"), result, wanted):
            text = f"rank {rank} of {world_size} on {device}: {name} differ"
            expect(_same(got, expected), text)


def _arrays(*parts: Any) -> Tuple[Any, ...]:
    """On the host; what has no gradient stays None."""
    return tuple(None if part is None else part.detach().cpu().numpy() for part in parts)


def _same(got: Any, want: Any) -> bool:
    return got is None or (got.shape == want.shape and bool((got == want).all()))


CHECKS: list[Tuple[str, Check]] = [
    ("ContextParallelAttention", check_attention),
    ("EPAll2AllLayer", check_layer),
]
GPU_CHECKS: list[Tuple[str, Check]] = [
    ("simulation on a GPU", check_gpu_simulation),
    ("ContextParallelAttention on GPUs", lambda: _on_gpus(_attention)),
    ("EPAll2AllLayer on GPUs", lambda: _on_gpus(_layer)),
]
