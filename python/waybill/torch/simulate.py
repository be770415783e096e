"""Moving rows in one process, for torch tensors. See ``waybill`` for what each does."""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from .. import metadata as numpy_metadata
from .. import simulate
from .._arrays import sequence
from .._graphs import outside_graphs
from ..errors import InvalidArgument, ShapeMismatch
from ._tensors import bits_of, dtype_name, payload, require_memory, say_no_gradients

__all__ = ["orchestrate_simulate", "simulate_communication", "sum_kv_copies"]

_WHO = "orchestrate_simulate"
_INSTEAD = "AttentionStep is known to autograd"


@outside_graphs
def orchestrate_simulate(
    tensor: torch.Tensor,
    output_tensor: torch.Tensor,
    metadata: numpy_metadata.Metadata,
    *,
    overlap: str = "last_wins",
    num_threads: int = 0,
) -> torch.Tensor:
    """Moves rows between ranks as ``metadata`` says; returns ``output_tensor``, written in place.

    tensor (W, n, H) and output_tensor (W, m, H) have one dtype, any of torch's, and lie on one
    device: in host memory the compiled part copies, on a GPU one gather and scatter does. As in the
    original no gradients flow through it; it warns where a tensor requires them.
    """
    overlap = simulate.checked_overlap(overlap, _WHO)
    say_no_gradients(_WHO, _INSTEAD, tensor, output_tensor)
    source = require_memory(tensor, f"{_WHO}: tensor")
    output = require_memory(output_tensor, f"{_WHO}: output_tensor")
    if source.device != output.device:
        raise ShapeMismatch(
            f"{_WHO}: output_tensor lies on {output.device}, expected {source.device}, that of"
            " tensor"
        )
    if source.device.type == "cpu":
        simulate.run_simulation(
            *payload(source, f"{_WHO}: tensor"), *payload(output, f"{_WHO}: output_tensor"),
            metadata, overlap, num_threads,
        )  # fmt: skip
    else:
        _on_device(source, output, metadata, overlap)
    return output_tensor


def _on_device(
    source: torch.Tensor,
    output: torch.Tensor,
    metadata: numpy_metadata.Metadata,
    overlap: str,
) -> None:
    """The plan becomes a gather on the host; the rows never leave the device."""
    if source.dtype != output.dtype:
        raise ShapeMismatch(
            f"{_WHO}: output_tensor has dtype {dtype_name(output.dtype)}, expected"
            f" {dtype_name(source.dtype)}, that of tensor"
        )
    rows = simulate.source_rows(source.shape, output.shape, metadata, overlap=overlap)
    if 0 in (source.numel(), output.numel()):
        return
    if source.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
        raise ShapeMismatch(
            f"{_WHO}: output_tensor shares memory with tensor, expected memory of its own"
        )
    flat = torch.from_numpy(rows.reshape(-1))
    moved = flat >= 0
    to = moved.nonzero().squeeze(1).to(source.device)
    from_ = flat[moved].to(source.device)
    n, m = source.shape[1], output.shape[1]
    bits_of(output, _WHO)[to // m, to % m] = bits_of(source, _WHO)[from_ // n, from_ % n]


@outside_graphs
def simulate_communication(
    tensors: Sequence[torch.Tensor],
    metadata: numpy_metadata.Metadata,
    *,
    overlap: str = "last_wins",
) -> list[torch.Tensor]:
    """orchestrate_simulate for ranks with different numbers of rows; new tensors (R_w, ...)."""
    overlap = simulate.checked_overlap(overlap, "simulate_communication")
    sequence(tensors, "simulate_communication: tensors", "one tensor for each rank")
    given = [
        require_memory(t, f"simulate_communication: tensors[{i}]") for i, t in enumerate(tensors)
    ]
    devices = {t.device for t in given}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ShapeMismatch(f"simulate_communication: tensors lie on {names}, expected one device")
    say_no_gradients("simulate_communication", _INSTEAD, *given)
    flat = [simulate.as_matrix(t.detach().cpu()) for t in given]
    received = simulate.run_communication(
        [payload(t, "simulate_communication: tensors")[0] for t in flat],
        [dtype_name(t.dtype) for t in given], metadata, overlap,
    )  # fmt: skip
    return [
        torch.from_numpy(rows).view(t.dtype).reshape(rows.shape[0], *t.shape[1:]).to(t.device)
        for rows, t in zip(received, given)
    ]


@outside_graphs
def sum_kv_copies(
    planes: torch.Tensor,
    metadata: numpy_metadata.Metadata,
    rank: int,
    output: Optional[torch.Tensor] = None,
    num_threads: int = 0,
) -> torch.Tensor:
    """Sums the gradients of the copies of a rank's K (or V) rows after the reverse dispatch."""
    source = require_memory(planes, "sum_kv_copies: planes")
    if source.device.type != "cpu":
        raise InvalidArgument(f"sum_kv_copies: planes lie on {source.device}, expected host memory")
    if output is None:
        rows = simulate.gradient_rows(source.shape, metadata, rank)
        output = torch.empty((rows, *source.shape[1:]), dtype=source.dtype)
    target = require_memory(output, "sum_kv_copies: output")
    if target.device.type != "cpu":
        raise InvalidArgument(
            f"sum_kv_copies: output lies on {target.device}, expected host memory"
        )
    simulate.run_sum(
        *payload(source, "sum_kv_copies: planes"), *payload(target, "sum_kv_copies: output"),
        metadata, rank, num_threads,
    )  # fmt: skip
    return output
