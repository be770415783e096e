"""The two orders in which an ElasticBuffer gives rows: a row per token, and a row per topk slot."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from ..._lifetime import OfThisProcess
from ...errors import InvalidArgument, Unsupported
from .arguments import Call, Rows, counts_of, occurrences
from .events import Queue
from .handles import LayerKey, Layers, Received, reads_handle
from .intranode import Intranode, local_counts


class EPHandle(OfThisProcess):
    """The result of ``ElasticBuffer.dispatch`` for combines and other dispatches by it."""

    _why_not_copied = "what one rank's buffer knows of a dispatch: each dispatch gives one"

    _layout: Any  #: that the rows came by

    def __init__(self, part: Any, inner: Any, topk_idx: torch.Tensor, num_sms: int) -> None:
        self.part, self.inner = part, inner
        self.do_expand, self.num_experts = part.do_expand, part.num_experts
        self.expert_alignment = part.alignment
        self.num_max_tokens_per_rank = part.max_tokens
        self.num_sms, self.topk_idx = num_sms, topk_idx
        self.rows_out = 0  #: rows of the results
        self.num_recv_tokens_per_expert_list: List[int] = []  #: rounded up; empty: not waited for
        self.found: Optional[torch.Tensor] = None  #: compact: ids among this rank's experts
        self._metadata: Optional[torch.Tensor] = None

    @property
    def queue(self) -> Queue:
        """The queue of its buffer."""
        return self.part.queue

    @property
    def num_recv_tokens(self) -> int:
        """Tokens that came; of results of the worst case, their rows."""
        if not self.num_recv_tokens_per_expert_list:
            return self.rows_out
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1])

    @property
    def num_expanded_tokens(self) -> int:
        """Rows of the results, if they are expanded."""
        return self.rows_out if self.do_expand else 0

    @property
    @reads_handle
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """[ranks] int32: tokens that came from ranks 0..i."""
        counts: torch.Tensor = self.part.tokens_from(self)
        return counts.cumsum(0, dtype=torch.int32)

    @property
    @reads_handle
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """[local experts] int32: topk slots of each expert."""
        return self.part.choices_of(self)

    @property
    @reads_handle
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """[local experts] int32: the end of each expert's rows. Compact: of counts rounded up;
        expanded: without the padding after its own.
        """
        counts, step = self.num_unaligned_recv_tokens_per_expert, self.expert_alignment
        aligned = (counts + (step - 1)) // step * step
        ends = aligned.cumsum(0, dtype=torch.int32)
        return ends - aligned + counts if self.do_expand else ends

    @property
    @reads_handle
    def recv_src_metadata(self) -> torch.Tensor:
        """[tokens that came, 2 + topk] int32, by source rank and token: source rank *
        num_max_tokens_per_rank + token, the row of the token's first topk slot here, and of
        expanded rows the row of each topk slot, -1 where there is none.
        """
        if self._metadata is None:
            self._metadata = self._source()
        return self._metadata

    @recv_src_metadata.setter
    def recv_src_metadata(self, value: torch.Tensor) -> None:
        self._metadata = value

    @property
    @reads_handle
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """[tokens, ...] int32: the row of each token, or topk slot, where it went; -1."""
        tokens = self.topk_idx.shape[0]
        table: torch.Tensor = self._layout.token_dst_scatter_idx
        return table[0, :tokens].clone()

    def _source(self) -> torch.Tensor:
        tags = self._layout.recv_tags
        live = tags[:, 0] >= 0
        if self.do_expand:
            number = self._layout.recv_expert_offsets[-1]
        else:
            number = self.psum_num_recv_tokens_per_scaleup_rank[-1]
        rows = torch.arange(tags.shape[0], dtype=torch.int32, device=tags.device)
        rows = rows[live & (rows < number)]
        tags = tags[rows.long()]
        key = tags[:, 0].long() * self.num_max_tokens_per_rank + tags[:, 1]
        tokens, place = torch.unique(key, return_inverse=True)
        shape = (tokens.shape[0], 2 + self.topk_idx.shape[1])
        found = torch.full(shape, -1, dtype=torch.int32, device=tags.device)
        found[:, 0] = tokens.int()
        found[place, 1] = tags[:, 3]
        if self.do_expand:
            found[place, 2 + tags[:, 2].long()] = rows
        return found


class Compact:
    """A row for each token that has an expert here, by source rank and token."""

    do_expand = False

    def __init__(
        self, layers: Layers, num_bytes: int, num_experts: int, max_tokens: int, alignment: int
    ) -> None:
        self.num_experts, self.max_tokens, self.alignment = num_experts, max_tokens, alignment
        self._ranks, self.queue = layers.num_ranks, layers.queue
        self._rows = Intranode(layers, num_bytes, max_tokens)

    def check(self, x: torch.Tensor, ids: torch.Tensor, call: Call) -> None:
        """Raises where the windows have no room."""
        self._rows.check_room(x, call)

    def dispatch(
        self, x: Rows, ids: torch.Tensor, weights: Optional[torch.Tensor], exact: bool, num_sms: int
    ) -> Received:
        """Collective."""
        _, choices, inside = counts_of(ids, self.num_experts, self._ranks)
        worst = 0 if exact else self._ranks * self.max_tokens
        inner = self._rows.handle(inside, self._by_last_choice(ids, inside))
        got = self._rows.dispatch(x, inner, choices, ids, weights, self.alignment, worst, num_sms)
        handle = EPHandle(self, inner, ids, num_sms)
        handle._layout, handle.rows_out = inner.layout(), inner.rows_out
        handle.num_recv_tokens_per_expert_list = got.counts or []
        assert got.topk_idx is not None
        handle.found = got.topk_idx.clone()  # the caller may change the other
        return got._replace(handle=handle)

    def again(self, x: Rows, handle: EPHandle, weights: Any) -> Received:
        """Collective: other rows, and perhaps weights, by the same routing."""
        got = self._rows.again(x, handle.inner, handle.num_sms)._replace(handle=handle)
        if weights is None:
            return got._replace(topk_idx=None if handle.found is None else handle.found.clone())
        ids, arrived = self._rows.choices(
            handle.topk_idx, weights, handle.inner, self.num_experts, handle.num_sms
        )
        return got._replace(topk_idx=ids, topk_weights=arrived)

    def check_combine(
        self, x: Any, handle: EPHandle, weights: Any, bias: Any, call: Call
    ) -> List[torch.Tensor]:
        """Looks at all arguments of a combine; returns the biases."""
        tokens, topk = handle.topk_idx.shape
        shape = (handle.rows_out, handle.inner.key.hidden)
        biases = call.rows_and_biases(x, bias, shape, tokens)
        call.weights(weights, handle.rows_out, topk)
        return biases

    def combine(
        self, x: torch.Tensor, handle: EPHandle, weights: Any, biases: List[torch.Tensor]
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Collective."""
        return self._rows.combine(x, handle.inner, weights, biases, handle.num_sms)

    def _by_last_choice(self, ids: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """[tokens, ranks] the ranks of each token in the order in which DeepEP sums them: by the
        last topk slot that is there.
        """
        ranks = torch.arange(self._ranks, dtype=torch.int32, device=ids.device)
        home = ids // (self.num_experts // self._ranks)
        places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
        here = (home[:, None, :] == ranks[:, None]) & (ids >= 0)[:, None, :]
        last = torch.where(here, places, -1).amax(-1)
        order = last.argsort(dim=1, stable=True)
        return torch.where(inside.gather(1, order), order.int(), -1)

    def tokens_from(self, handle: EPHandle) -> torch.Tensor:
        """[ranks]"""
        return handle.inner.counts()[:, self._rows.rank]

    def choices_of(self, handle: EPHandle) -> torch.Tensor:
        """[local experts] int32"""
        assert handle.found is not None
        return local_counts(handle.found, self.num_experts // self._ranks)


class Expanded:
    """A row for each topk slot, by expert, source rank, token, topk slot; padded with zeros."""

    do_expand = True

    def __init__(
        self, layers: Layers, num_bytes: int, num_experts: int, max_tokens: int, alignment: int
    ) -> None:
        del num_bytes  # they count a row for each token
        self.num_experts, self.max_tokens, self.alignment = num_experts, max_tokens, alignment
        self._ranks, self.queue = layers.num_ranks, layers.queue
        self._layers = layers

    def check(self, x: torch.Tensor, ids: torch.Tensor, call: Call) -> None:
        """Raises where the windows have no room."""
        if x.shape[0] > self.max_tokens:
            raise InvalidArgument(
                f"{call.who}: x of rank {call.rank} has {x.shape[0]} tokens, expected at most"
                f" num_max_tokens_per_rank = {self.max_tokens}"
            )
        call.not_too_many(ids, self.num_experts, self.max_tokens)

    def dispatch(
        self, x: Rows, ids: torch.Tensor, weights: Optional[torch.Tensor], exact: bool, num_sms: int
    ) -> Received:
        """Collective."""
        topk, local = ids.shape[1], self.num_experts // self._ranks
        fixed_rows = self._ranks * self.max_tokens * min(topk, local) + local * (self.alignment - 1)
        key = LayerKey(
            x.payload, x.x.shape[1], self.max_tokens, self.num_experts, topk, fixed_rows,
            self.alignment, max_per_expert=self.max_tokens,
        )  # fmt: skip
        layer = self._layers.get(key, num_sms)
        layout: Any
        rows, arrived, layout = layer.dispatch(x.x, ids, weights, scales=x.held())
        handle = EPHandle(self, key, ids, num_sms)
        handle._layout = layout
        handle.rows_out = layout._handle.num_recv_rows() if exact else key.fixed_rows
        got = self._taken(rows, arrived, x.shown(layout.recv_scales), handle)
        if exact:
            step = key.alignment
            counts = layout.recv_expert_counts.tolist()
            handle.num_recv_tokens_per_expert_list = [-(-n // step) * step for n in counts]
        return got

    def again(self, x: Rows, handle: EPHandle, weights: Any) -> Received:
        """Collective: other rows, and perhaps weights, by the same routing."""
        key, layout = handle.inner, handle._layout
        layer = self._layers.get(key, handle.num_sms)
        if key.kind != x.payload:
            raise InvalidArgument(
                f"ElasticBuffer.dispatch: x of rank {self._layers.rank} is {x.payload}, expected"
                f" {key.kind} as in the dispatch of the handle, as rows are expanded"
            )
        rows, arrived, made = layer.dispatch(
            x.x, handle.topk_idx, weights, scales=x.held(), layout_desc=layout
        )
        return self._taken(rows, arrived, x.shown(made.recv_scales), handle)

    def check_combine(
        self, x: Any, handle: EPHandle, weights: Any, bias: Any, call: Call
    ) -> List[torch.Tensor]:
        """Looks at all arguments of a combine; returns the biases."""
        if weights is not None:
            raise Unsupported(f"{call.who}: topk_weights of expanded rows, expected None")
        shape = (handle.rows_out, handle.inner.hidden)
        return call.rows_and_biases(x, bias, shape, handle.topk_idx.shape[0])

    def combine(
        self, x: torch.Tensor, handle: EPHandle, weights: Any, biases: List[torch.Tensor]
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Collective."""
        layer = self._layers.get(handle.inner, handle.num_sms)
        return layer.combine(x, handle._layout, biases=biases), None

    def tokens_from(self, handle: EPHandle) -> torch.Tensor:
        """[ranks]: rows that are the first of their token here."""
        layout = handle._layout
        tags = layout.recv_tags
        place = torch.arange(tags.shape[0], dtype=torch.int32, device=tags.device)
        first = (tags[:, 3] == place) & (place < layout.recv_expert_offsets[-1])
        return occurrences(torch.where(first, tags[:, 0], self._ranks), self._ranks)

    def choices_of(self, handle: EPHandle) -> torch.Tensor:
        """[local experts] int32"""
        return handle._layout.recv_expert_counts.clone()

    def _taken(self, rows: torch.Tensor, weights: Any, scales: Any, handle: EPHandle) -> Received:
        taken = [
            None if one is None else one[: handle.rows_out].clone() for one in (scales, weights)
        ]
        return Received(rows[: handle.rows_out].clone(), taken[0], None, taken[1], None, handle)
