"""The descriptor that a layer's dispatch gives."""

from __future__ import annotations

from typing import Any, Dict, Optional, TypeVar

import torch

from ..._copies import OfThisProcess
from ..._graphs import outside_graphs
from ...moe import EPAllToAllLayoutDesc
from .._tensors import stream_of
from .tensors import shown

_L = TypeVar("_L", bound="LayerLayout")
_ONE_NODE = ("skipped_token_mapping_indices", "skipped_token_topk_mapping_indices")
_COMPACT = ("recv_topk_indices", "compact_to_grouped", "grouped_to_compact")
_TABLES = (
    "num_input_tokens_per_rank", "send_reqs_recv_tensor", "topk_indices_tensor",
    "token_dst_scatter_idx", *_ONE_NODE, "recv_expert_counts", "recv_expert_offsets", *_COMPACT,
    "recv_tags", "num_recv_tokens_per_rank", "required_rows",
)  # fmt: skip


class LayerLayout(OfThisProcess, EPAllToAllLayoutDesc):
    """Its tables become tensors when they are asked for: views of memory that it keeps, but for
    the two maps, which are copies. A call of a few tokens takes less time than all of them.

    It never changes: dispatches by it give descriptors of their own. On GPUs its memory is used
    again when it and its tensors are gone, behind work on the stream that was current when the
    first of them was asked for.
    """

    _why_not_copied = "tables of one rank's layer: each dispatch gives one; its tensors can be"
    recv_scales: Optional[torch.Tensor]
    required_rows: torch.Tensor  #: [1] int32 on the device: rows of the fullest rank
    capacity_rows: int  #: of the windows

    def __init__(
        self, handle: Any, one_node: bool, grouped: bool, device: torch.device, capacity_rows: int
    ) -> None:
        self._handle = handle
        self._device = device
        self._one_node, self._grouped = one_node, grouped
        self._tensors: Dict[str, Optional[torch.Tensor]] = {}
        self._token: Optional[torch.Tensor] = None
        self._weights: Optional[torch.Tensor] = None  #: of the rows, as the dispatch gave them
        self.num_dispatch_token_cur_rank = handle.num_tokens
        self.capacity_rows = capacity_rows

    def __copy__(self: _L) -> _L:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def overflow(self) -> torch.Tensor:
        """[1] on the device, the same on all ranks: whether the windows had no room for all rows of
        one of them.
        """
        required = self._table("required_rows")
        assert required is not None
        return required > self.capacity_rows

    @outside_graphs
    def _table(self, name: str) -> Optional[torch.Tensor]:
        if name not in self._tensors:
            self._tensors[name] = self._make(name)
        return self._tensors[name]

    def _make(self, name: str) -> Optional[torch.Tensor]:
        nodes_only = name == "send_reqs_recv_tensor"
        maps = name in _ONE_NODE
        if (self._one_node and nodes_only) or (self._grouped and name in _COMPACT):
            return None
        if maps and not (self._one_node and self._grouped):
            return None
        table = shown(self._handle.table(name, stream_of(self._device)), torch.int32)
        return table.to(torch.int64) if maps and table is not None else table


def _reader(name: str) -> property:
    return property(lambda layout: layout._table(name))


for _name in _TABLES:
    setattr(LayerLayout, _name, _reader(_name))
