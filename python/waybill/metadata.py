"""Metadata: which rows of one tensor go where, in one direction."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np

from . import _core, _html, _plot
from ._arrays import IntArray, int64, integer, plain_array, whole_numbers
from ._errors import shown
from ._files import json_text, kept
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
        made = list(_core.get_slice(self._fields(arrays), number))
        for at, given in enumerate(arrays.values()):
            if made[at] is not None:
                made[at] = made[at].astype(given.dtype, copy=False)
        return self._from_fields(tuple(made))

    def normalize_dtype(self: _M) -> _M:
        """The dtypes of device tables: int32 ranks, uint32 offsets and lengths, uint64 counts.

        Raises InvalidArgument naming field, position and value of what does not fit.
        """
        return self._from_fields(_core.normalize_dtype(self._fields()))

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
        """A line per shard; what is odd is shown as it is and named at the end. Never raises."""
        fields, odd = self._readable()
        if all(field is not None for field in fields[: len(_MOVES)]):
            text, shown_fields = _core.metadata_text(fields), list(odd)
        else:
            text, shown_fields = "Metadata whose tables cannot be read\n", list(vars(self))
        for name in shown_fields:
            if getattr(self, name) is not None:
                text += f"  {name}: {_text(getattr(self, name))}\n"
        return text + "".join(f"odd: {why}\n" for why in odd.values())

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        inside = ", ".join(
            f"{name}={_text(value, repr)}" for name, value in given if value is not None
        )
        return f"{type(self).__name__}({inside})"

    def _repr_html_(self) -> str:
        try:
            host = Metadata(*self._values())
            if host.is_slice:
                return _html.slice_html(host.dst_rank, host.dst_offset, host.seq_len)
            return _html.metadata_html(host.traffic(), host.seq_len)
        except Exception:  # no table can be made of what is there: the notebook shows the text
            return _html.plain_text(str(self))

    def _fields(self, arrays: Optional[dict[str, Any]] = None) -> Fields:
        """The ten fields for the compiled part: numpy arrays, plain numbers, None."""
        given = self._arrays() if arrays is None else arrays
        return (*(_whole(name, array) for name, array in given.items()), *self._numbers())

    def _readable(self) -> Tuple[Fields, dict[str, str]]:
        """The same where fields may hold anything: None for what is no such field, and why."""
        readers: dict[str, Any] = {
            **{name: lambda name=name: _whole(name, self._array(name)) for name in _TENSORS},
            "world_size": self._world,
            "normalized": lambda: bool(self.normalized),
            "num_total_recv_tokens": self._totals,
        }
        fields: dict[str, Any] = {}
        odd: dict[str, str] = {}
        for name, read in readers.items():
            try:
                fields[name] = read()
            except Exception as error:
                fields[name] = False if name == "normalized" else None
                odd[name] = _text(error).removeprefix("Metadata: ")
        for name in _MOVES:
            if fields[name] is None and name not in odd:
                odd[name] = f"{name} is missing"
        return tuple(fields.values()), odd

    def _moves(self, with_counts: bool = False) -> Fields:
        """The same for a simulation, which reads where the rows go, and at most their counts. Any
        negative rank is none.
        """
        ranks, offsets, lens = (
            whole_numbers(self._host(getattr(self, name)), f"Metadata: {name}") for name in _MOVES
        )
        if ranks.dtype.kind == "i" and (ranks < -1).any():
            ranks = np.maximum(ranks, -1)
        counts = None
        if with_counts and self.num_recv_tokens is not None:
            name = "Metadata: num_recv_tokens"
            counts = whole_numbers(self._host(self.num_recv_tokens), name, floats=True)
        return (ranks, offsets, lens, counts, None, None, None, None, False, None)

    def _values(self) -> Fields:
        """The ten fields as they are, tensors as numpy arrays."""
        return (*self._arrays().values(), *self._numbers())

    def _arrays(self) -> dict[str, Any]:
        """The tensors by name as contiguous numpy arrays of any dtype, or None."""
        return {name: self._array(name) for name in _TENSORS}

    def _array(self, name: str) -> Any:
        value = self._host(getattr(self, name))
        return None if value is None else plain_array(value, f"Metadata: {name}")

    def _numbers(self) -> Tuple[Any, bool, Any]:
        """world_size, normalized and the totals."""
        return self._world(), bool(self.normalized), self._totals()

    def _world(self) -> Optional[int]:
        world = self.world_size
        return None if world is None else int64(world, "Metadata: world_size")

    def _totals(self) -> Any:
        name = "Metadata: num_total_recv_tokens"
        totals: Any = self.num_total_recv_tokens
        if totals is None or isinstance(totals, int):
            return None if totals is None else int64(totals, name)
        totals = whole_numbers(self._host(totals), name, floats=True)
        totals = totals.astype(np.int64).tolist()
        if isinstance(totals, list) and any(isinstance(total, list) for total in totals):
            raise InvalidArgument(f"{name} has several axes, expected W totals or one")
        return totals

    @staticmethod
    def _host(value: Any) -> Any:
        return value

    @classmethod
    def _from_fields(cls: type[_M], fields: Fields) -> _M:
        return cls(*fields)


def _whole(name: str, array: Any) -> Any:
    """A tensor of integers, which where no rows move may also be whole floats; None stays None."""
    if array is None:
        return None
    return whole_numbers(array, f"Metadata: {name}", floats=name not in _MOVES)


def _text(value: Any, show: Any = str) -> str:
    """The text of an object that may have none."""
    try:
        return str(show(value))
    except Exception:
        return f"a {type(value).__name__} without a text"


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
