"""Metadata: which rows of one tensor go where, in one direction."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np

from . import _core, _html, _plot
from ._arrays import IntArray, int64, integer, plain_array, whole_numbers
from ._files import json_text, kept
from ._wrong_call import shown
from .errors import InvalidArgument

Fields = Tuple[Any, ...]
_TENSORS = (
    "dst_rank",
    "dst_offset",
    "seq_len",
    "num_recv_tokens",
    "seq_recv_mask",
    "recv_seq_lens",
    "num_seqs",
)
_MOVES = _TENSORS[:3]  # what says where rows go
_COUNTS = _TENSORS.index("num_recv_tokens")
_NO_COUNTS = np.zeros(0, np.int64)
_M = TypeVar("_M", bound="Metadata")


@dataclass(eq=False, repr=False)
class Metadata:
    """Which rows of one tensor go where, in one direction, for all ranks; or for one (a slice).

    W = world_size, S = most shards on a rank, C = most copies of a shard. Every offset, length and
    count is in tokens (rows). Padding: dst_rank -1, dst_offset 0, seq_len 0. Rank w holds its
    shards back to back, so shard j begins at row ``seq_len[w, :j].sum()``. A slice drops the
    first axis.

    Fields are numpy arrays here and torch tensors in ``waybill.torch.Metadata``; the constructor
    keeps what it is given.
    """

    dst_rank: Any  #: (W, S) or (W, S, C): destination rank, -1 none
    dst_offset: Any  #: as dst_rank: first row in the destination's buffer
    seq_len: Any  #: (W, S): rows of the shard
    num_recv_tokens: Any  #: (W, W + 1): [r, i] rows that r gets from i; last column the sum
    seq_recv_mask: Optional[Any] = None  #: (W, S, C) bool: which copies come back (reverse)
    recv_seq_lens: Optional[Any] = None  #: (W, S): lengths of the shards that come back
    num_seqs: Optional[Any] = None  #: (W,): shards with rows; None in a slice
    world_size: Optional[int] = None  #: None in a slice
    normalized: bool = False  #: dtypes are those of the device form
    num_total_recv_tokens: Union[int, Sequence[int], None] = None  #: W totals; one in a slice

    def get_slice(self: _M, rank: int) -> _M:
        """The lines of one rank, without those that move nothing."""
        number = integer(rank, "get_slice: rank")
        if abs(number) >= 2**31:  # the compiled part names the others
            raise InvalidArgument(f"get_slice: rank = {shown(number)}, expected one of the world")
        arrays = self._arrays()
        made = list(_core.get_slice(_with_square_counts(self._fields(arrays)), number))
        for at, given in enumerate(arrays.values()):
            if given is None:
                made[at] = None
            elif at == _COUNTS:  # of other columns, perhaps
                made[at] = np.array(given[number])
            elif made[at] is not None:
                made[at] = made[at].astype(given.dtype, copy=False)
        return self._from_fields(tuple(made))

    def normalize_dtype(self: _M) -> _M:
        """The dtypes of device tables: int32 ranks, uint32 offsets and lengths, uint64 counts.

        Raises InvalidArgument naming field, position and value of what does not fit.
        """
        fields = self._fields()
        made = list(_core.normalize_dtype(_with_counts(fields, fields[_COUNTS])))
        if fields[_COUNTS] is None:
            made[_COUNTS] = None
        return self._from_fields(tuple(made))

    def cuda(self, device: Any = None) -> Any:
        """A ``waybill.torch.Metadata`` with every tensor on the GPU, contiguous."""
        from .torch import metadata as torch_metadata  # needs torch, which the package does not

        return torch_metadata.Metadata.from_numpy(self).cuda(device)

    def to_json(
        self, path: Union[str, os.PathLike[str], None] = None, compact: bool = False
    ) -> str:
        """The text of format ``waybill.metadata``; also written to ``path`` when one is given."""
        return kept(_core.metadata_to_json(self._fields(), compact), path)

    @classmethod
    def from_json(cls: type[_M], text: Union[str, os.PathLike[str]]) -> _M:
        """The inverse of to_json: from a text, or from a file (a path that is no JSON text)."""
        return cls._from_fields(_core.metadata_from_json(*json_text(text, "Metadata.from_json")))

    @property
    def is_slice(self) -> bool:
        """True for what get_slice returns."""
        return np.ndim(self.seq_len) == 1

    def traffic(self) -> Any:
        """(W, W): rows that rank i (row) sends to rank r (column), local ones on the diagonal. From
        the counts; from the tables where there are none, or one per rank.
        """
        if self.is_slice:
            raise InvalidArgument("Metadata.traffic: a slice knows one rank, expected all ranks")
        ranks, _, lens, counts, *_ = self._fields()
        world = len(lens) if lens is not None and lens.ndim == 2 else -1
        if world >= 0 and (counts is None or counts.shape == (world, 1)):
            return _sent_rows(ranks, lens)
        if world < 0 or counts is None or counts.shape != (world, world + 1):
            shapes = [list(np.shape(array)) for array in (lens, counts)]
            raise InvalidArgument(
                f"Metadata.traffic: seq_len and num_recv_tokens have shapes {shapes}, expected"
                " [W, S] and [W, W + 1]"
            )
        return counts[:, :-1].astype(np.int64).T

    def plot_traffic(self, ax: Any = None) -> Any:
        """Draws traffic() as a heat map with matplotlib; returns the axes."""
        return _plot.heat_map(self.traffic(), ax, "rows sent", "receiving rank", "sending rank")

    def plot_load(self, ax: Any = None) -> Any:
        """Draws the rows that every rank sends to and gets from others; returns the axes."""
        sent, got = _html.wire_rows(self.traffic())
        return _plot.bars({"out": sent, "in": got}, ax, "rows on the wire")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        for ours, theirs in zip(self._values(), other._values()):
            if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
                if ours.dtype != theirs.dtype or not np.array_equal(ours, theirs):
                    return False
            elif ours is None or theirs is None:
                if ours is not theirs:
                    return False
            elif ours != theirs:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        fields = self._fields()
        square = _with_square_counts(fields)
        text = _core.metadata_text(square)
        return text if square is fields else _with_their_counts(text, fields[_COUNTS])

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        inside = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        return f"{type(self).__name__}({inside})"

    def _repr_html_(self) -> str:
        host = Metadata(*self._values())
        if host.is_slice:
            return _html.slice_html(host.dst_rank, host.dst_offset, host.seq_len)
        return _html.metadata_html(host.traffic(), host.seq_len)

    def _fields(self, arrays: Optional[dict[str, Any]] = None) -> Fields:
        """The ten fields for the compiled part: numpy arrays, plain numbers, None."""
        tensors = [
            None
            if value is None
            else whole_numbers(value, f"Metadata: {name}", floats=name not in _MOVES)
            for name, value in (self._arrays() if arrays is None else arrays).items()
        ]
        return (*tensors, *self._numbers())

    def _moves(self, with_counts: bool = False) -> Fields:
        """The same for a simulation, which reads where the rows go, and at most their counts. Any
        negative rank is none.
        """
        ranks, offsets, lens = (
            whole_numbers(self._host(getattr(self, name)), f"Metadata: {name}") for name in _MOVES
        )
        if ranks.dtype.kind == "i" and (ranks < -1).any():
            ranks = np.maximum(ranks, -1)
        counts = _NO_COUNTS
        if with_counts:
            name = "Metadata: num_recv_tokens"
            counts = whole_numbers(self._host(self.num_recv_tokens), name, floats=True)
        return (ranks, offsets, lens, counts, None, None, None, None, False, None)

    def _copies(self) -> Fields:
        """The same for a sum over copies, which reads no counts."""
        fields = self._fields()
        return _with_counts(fields, fields[_COUNTS])

    def _values(self) -> Fields:
        """The ten fields as they are, tensors as numpy arrays."""
        return (*self._arrays().values(), *self._numbers())

    def _arrays(self) -> dict[str, Any]:
        """The tensors by name as contiguous numpy arrays of any dtype, or None."""
        values = {name: self._host(getattr(self, name)) for name in _TENSORS}
        return {
            name: None if value is None else plain_array(value, f"Metadata: {name}")
            for name, value in values.items()
        }

    def _numbers(self) -> Tuple[Any, bool, Any]:
        """world_size, normalized and the totals."""
        totals: Any = self.num_total_recv_tokens
        if totals is not None and not isinstance(totals, int):
            name = "Metadata: num_total_recv_tokens"
            totals = whole_numbers(self._host(totals), name, floats=True)
            totals = totals.astype(np.int64).tolist()
            if isinstance(totals, list) and any(isinstance(total, list) for total in totals):
                raise InvalidArgument(f"{name} has several axes, expected W totals or one")
        world = self.world_size
        world = None if world is None else int64(world, "Metadata: world_size")
        return world, bool(self.normalized), totals

    @staticmethod
    def _host(value: Any) -> Any:
        return value

    @classmethod
    def _from_fields(cls: type[_M], fields: Fields) -> _M:
        return cls(*fields)


def _with_counts(fields: Fields, counts: Optional[IntArray]) -> Fields:
    """The compiled part has no word for no counts."""
    counts = _NO_COUNTS if counts is None else counts
    return (*fields[:_COUNTS], counts, *fields[_COUNTS + 1 :])


def _with_square_counts(fields: Fields) -> Fields:
    """With counts of the shape that the compiled part asks for, where the caller has none, or some
    of other columns, [W, 1] say: their values are then none.
    """
    lens, counts = fields[2], fields[_COUNTS]
    if lens is None or lens.ndim not in (1, 2):
        return fields  # the compiled part says what is wrong
    if lens.ndim == 1:
        return fields if counts is not None else _with_counts(fields, np.zeros(1, np.int64))
    world = len(lens)
    other = counts is not None and (
        counts.ndim != 2 or len(counts) != world or counts.shape[1] in (0, world + 1)
    )
    return fields if other else _with_counts(fields, np.zeros((world, world + 1), np.int64))


def _with_their_counts(text: str, counts: Optional[IntArray]) -> str:
    """What is printed, with the caller's counts."""
    rows = iter([] if counts is None else counts.tolist())
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("  receives "):
            row = next(rows, None)
            line = "" if row is None else f"  receives {row} rows\n"
        lines.append(line)
    return "".join(lines)


def _sent_rows(ranks: IntArray, lens: IntArray) -> IntArray:
    """(W, W) of the tables: rows of a rank to each."""
    world = len(lens)
    if ranks is None or ranks.shape[:2] != lens.shape or ranks.ndim not in (2, 3):
        raise InvalidArgument(
            f"Metadata.traffic: dst_rank has shape {list(np.shape(ranks))}, expected"
            f" {list(lens.shape)} or {[*lens.shape, 'C']}"
        )
    if (ranks >= world).any():
        raise InvalidArgument(
            f"Metadata.traffic: dst_rank has {int(ranks.max())}, expected at most {world - 1}"
        )
    rows = np.broadcast_to(lens if ranks.ndim == 2 else lens[..., None], ranks.shape)
    sent = np.zeros((world, world), np.int64)
    live = ranks >= 0
    np.add.at(sent, (np.nonzero(live)[0], ranks[live].astype(np.int64)), rows[live])
    return sent


def require_metadata(value: Any, who: str) -> Metadata:
    """An argument that must be Metadata, of numpy or torch."""
    if not isinstance(value, Metadata):
        raise InvalidArgument(
            f"{who}: metadata is a {type(value).__name__}, expected a waybill.Metadata"
        )
    return value
