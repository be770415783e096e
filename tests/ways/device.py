"""What all ways have: where their ranks lie, and tensors in the memory that an edge asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def settle(device: Any) -> None:
    """Waits for this rank's stream: nothing may be copied to pageable memory after a kernel that
    waits for a rank on the same GPU.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream().synchronize()


def tensor_of(
    array: np.ndarray, device: Any, dtype: torch.dtype | None = None, how: Any = None
) -> torch.Tensor:
    """A tensor of an array, in the memory that a round or a batch asks for."""
    plain = torch.from_numpy(np.ascontiguousarray(array))
    if dtype is not None:
        plain = plain.to(dtype) if plain.is_floating_point() else plain.view(dtype)
    if plain.numel() == 0:
        if how is not None and how.slices:  # of memory that is there
            return torch.zeros(2, *plain.shape[1:], dtype=plain.dtype, device=device)[:0]
        return torch.empty(plain.shape, dtype=plain.dtype, device=device)  # without memory
    if how is None:
        return plain.to(device)
    if how.odd_address:
        flat = torch.empty(plain.numel() + 1, dtype=plain.dtype, device=device)
        flat[1:] = plain.reshape(-1).to(device)
        return flat[1:].view(plain.shape)
    return plain.to(device)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """Integers of the tensor's bits; whole numbers as they are."""
    one_byte = tensor.is_floating_point() and tensor.element_size() == 1
    kind = torch.uint8 if one_byte else DTYPES.get(tensor.dtype)
    tensor = tensor.detach().contiguous()
    return (tensor if kind is None else tensor.view(kind)).cpu().numpy().copy()


@dataclass(frozen=True)
class Way:
    """One way to move rows, and which ranks can go it."""

    name: str
    title: str
    family: str = ""
    edges: dict[str, Any] = field(default_factory=dict)
    ranks: str = "threads"  #: or "processes"
    backend: str = "mapped"  #: between nodes: "mapped", "nccl" or "nvshmem"
    devices: tuple[str, ...] = ("cpu", "cuda")
    topologies: tuple[tuple[int, int], ...] = ((3, 3),)
    patience: float = 1.0  #: multiplies the deadline of waits: ranks may compile before they send

    @property
    def over_nodes(self) -> bool:
        """Whether rows travel between nodes."""
        return any(per_node < world for world, per_node in self.topologies)

    def excluded(self, edge: str, device: str) -> str | None:
        """Why the edge means nothing here."""
        if device not in self.devices:
            return "on GPUs alone"
        if edge == "one_rank" and self.over_nodes:
            return "several nodes have several ranks"
        return None
