"""Ring attention of torch (torch.distributed.tensor.experimental.context_parallel) on one document
that fills all ranks: what it can do, as it knows no packed ones.

Heads of K and V are repeated before, outside of the time, as torchtitan's models repeat them.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from step_clock import StepClock
from torch import distributed
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def ring_milliseconds(batch: list[torch.Tensor], steps: int, warm: int) -> float:
    """The median of the slowest rank's steps; q, k, v and the output's gradient of all ranks are
    [rows, heads, head_dim].
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    device = batch[0].device
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    heads = batch[0].shape[1]
    buffers: list[Any] = [
        rows.repeat_interleave(heads // rows.shape[1], 1).transpose(0, 1).unsqueeze(0).contiguous()
        for rows in batch
    ]
    times = []
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
    ):
        q, k, v, grad = buffers
        for tensor in (q, k, v):
            tensor.requires_grad_()
        for step in range(warm + steps):
            q.grad = k.grad = v.grad = None
            distributed.barrier()
            clock = StepClock(device)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                out.backward(grad)
            clock.mark("step")
            milliseconds, _ = clock.finish()
            if step >= warm:
                times.append(milliseconds)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return statistics.median(slowest.tolist())
