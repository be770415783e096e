"""Metadata (which rows of one tensor go where, in one direction), and the records around it."""

from __future__ import annotations

import dataclasses
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Tuple, TypeVar, Union

import numpy as np

from . import _core, _report
from ._arrays import IntArray, instance, int64, integer, json_text, kept, plain_array, whole_numbers
from ._errors import shown
from .errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .torch.functions import Metadata as TorchMetadata

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
_MOVES = _TENSORS[:3]  # these say where rows go
_FIELDS = (*_TENSORS, "world_size", "normalized", "num_total_recv_tokens")
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
    # Any, too, where it may be None: programs index the tables that they know to be there.
    seq_recv_mask: Any = None  #: (W, S, C) bool: which copies come back (reverse)
    recv_seq_lens: Any = None  #: (W, S): lengths of the shards that come back
    num_seqs: Any = None  #: (W,): shards with rows; None in a slice
    world_size: Optional[int] = None  #: None in a slice
    normalized: bool = False  #: dtypes are those of the device form
    num_total_recv_tokens: Any = None  #: W totals; one in a slice

    def get_slice(self: _M, rank: int) -> _M:
        """The lines of one rank, without those that move nothing."""
        number = integer(rank, "get_slice: rank")
        if abs(number) >= 2**31:  # the compiled part names the others
            raise InvalidArgument(f"get_slice: rank = {shown(number)}, expected one of the world")
        values = self._values()
        made = list(_core.get_slice(tuple(map(_whole, _FIELDS, values)), number))
        for at in range(len(_TENSORS)):
            if made[at] is not None:
                made[at] = made[at].astype(values[at].dtype, copy=False)
        return self._from_fields(tuple(made))

    def normalize_dtype(self: _M) -> _M:
        """The dtypes of device tables: int32 ranks, uint32 offsets and lengths, uint64 counts.

        Raises InvalidArgument naming field, position and value of what does not fit.
        """
        return self._from_fields(_core.normalize_dtype(self._fields()))

    def cuda(self, device: Any = None) -> TorchMetadata:
        """A ``waybill.torch.Metadata`` with every tensor on the GPU, contiguous."""
        from .torch import functions as torch_metadata  # needs torch, which the package does not

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

    def traffic(self) -> IntArray:
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

    def plot_traffic(self, ax: Optional[Axes] = None) -> Axes:
        """Draws traffic() as a heat map with matplotlib; returns the axes."""
        return _report.heat_map(self.traffic(), ax, "rows sent", "receiving rank", "sending rank")

    def plot_load(self, ax: Optional[Axes] = None) -> Axes:
        """Draws the rows that every rank sends to and gets from others; returns the axes."""
        sent, got = _report.wire_rows(self.traffic())
        return _report.bars({"out": sent, "in": got}, ax, "rows on the wire")

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
                return _report.slice_html(host.dst_rank, host.dst_offset, host.seq_len)
            return _report.metadata_html(host.traffic(), host.seq_len)
        except Exception:  # no table can be made of what is there: the notebook shows the text
            return _report.plain_text(str(self))

    def _fields(self) -> Fields:
        """The ten fields for the compiled part: numpy arrays, plain numbers, None."""
        return tuple(map(_whole, _FIELDS, self._values()))

    def _readable(self) -> Tuple[Fields, dict[str, str]]:
        """_fields where fields may hold anything: None for a wrong one, and the reasons by name."""
        fields: dict[str, Any] = {}
        odd: dict[str, str] = {}
        for name in _FIELDS:
            try:
                fields[name] = _whole(name, self._value(name))
            except Exception as error:
                fields[name] = False if name == "normalized" else None
                odd[name] = _text(error).removeprefix("Metadata: ")
        for name in _MOVES:
            if fields[name] is None and name not in odd:
                odd[name] = f"{name} is missing"
        return tuple(fields.values()), odd

    def _moves(self, with_counts: bool = False) -> Fields:
        """_fields for a simulation, which reads where the rows go, and at most their counts. Any
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
        return tuple(map(self._value, _FIELDS))

    def _value(self, name: str) -> Any:
        value, label = getattr(self, name), f"Metadata: {name}"
        if name == "normalized":
            return bool(value)
        if value is None:
            return None
        if name in _TENSORS:
            return plain_array(self._host(value), label)
        if name == "world_size" or isinstance(value, int):
            return int64(value, label)
        totals = whole_numbers(self._host(value), label, floats=True)
        if totals.ndim > 1:
            raise InvalidArgument(f"{label} has several axes, expected W totals or one")
        return totals.astype(np.int64).tolist()

    @staticmethod
    def _host(value: Any) -> Any:
        return value

    @classmethod
    def _from_fields(cls: type[_M], fields: Fields) -> _M:
        return cls(*fields)


def _whole(name: str, value: Any) -> Any:
    """A tensor of integers, which where no rows move may also be whole floats; else the value."""
    if value is None or name not in _TENSORS:
        return value
    return whole_numbers(value, f"Metadata: {name}", floats=name not in _MOVES)


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
    instance(value, Metadata, f"{who}: metadata", "a waybill.Metadata")
    return value


Ragged = Union[Any, Tuple[Any, ...]]


class AttnLayout(NamedTuple):
    """Arguments of variable-length attention after the forward dispatch, rows.

    Padded: arrays (W, N + 1), where the last sum repeats over the padding. Ragged: tuples of W
    arrays (n_r + 1,). Without the leading zero each is one shorter.
    """

    cu_seqlens_q: Ragged
    cu_seqlens_kv: Ragged
    max_seqlen_q: Any  #: (W,)
    max_seqlen_kv: Any  #: (W,)
    num_local_seqs_recv: Any  #: (W,): query shards that each rank receives


class RankKvLayout(NamedTuple):
    """The attention layout where KV lies once per rank: query shards read ranges of it, rows."""

    cu_seqlens_q: Tuple[Any, ...]  #: W arrays (n_r + 1,)
    kv_begin: Tuple[Any, ...]  #: W arrays (n_r,): first row of the shard's context
    kv_len: Tuple[Any, ...]  #: W arrays (n_r,): rows of the context, the shard included
    max_seqlen_q: Any  #: (W,)
    max_seqlen_kv: Any  #: (W,)
    num_local_seqs_recv: Any  #: (W,)


class QkvMetadata(NamedTuple):
    """All that a step needs: four metadata and the attention layout."""

    fwd_q: Metadata
    rev_q: Metadata
    fwd_kv: Metadata
    rev_kv: Metadata
    attention: Union[AttnLayout, RankKvLayout]


class RawQkvDispatch(NamedTuple):
    """A plan in DistCA's dense form. P = most shards on a rank, C = most copies. int64."""

    cp_seq_lens: Any  #: (W, P): rows of each shard; padding 0
    num_cp_shards: Any  #: (W,): shards on the rank
    cp_query_dst: Any  #: (W, P): destination rank; padding -1
    kv_to_q_mapping: Any  #: (W, P, C, 2): (query rank, query shard); -1, -1 unused
    kv_to_q_rank: Any  #: (W, P, C): place among the query's KV shards, -1 unused
    kv_context_size: Any  #: (W, P): rows of the document before this shard
    q_to_num_kv_seq: Any  #: (W, P): KV shards of the query
    q_to_num_kv_tokens: Any  #: (W, P): their rows
    seq_lens: Tuple[Any, ...]  #: (lengths before sharding,) when asked for, else ()


@dataclass
class PackedSeqParams:
    """Arguments of variable-length attention in the MLP layout, under Megatron's names."""

    qkv_format: str  #: "thd": tokens, heads, head size
    cu_seqlens_q: Any  #: (n + 1,) int64, leading 0
    cu_seqlens_kv: Any  #: the same
    max_seqlen_q: Any
    max_seqlen_kv: Any

    def to_megatron(self, device: Any = None) -> Any:
        """The same as Megatron's ``PackedSeqParams``, as Transformer Engine takes it: tensors of
        int32, maxima that are integers. On ``device``, else where the tensors lie.

        Raises Unsupported where Megatron Core is not installed.
        """
        try:
            theirs = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
            torch = importlib.import_module("torch")
        except ImportError as error:
            raise Unsupported(
                f"PackedSeqParams.to_megatron: {error}, expected megatron-core to be installed"
            ) from None
        if int(self.cu_seqlens_q[-1]) >= 2**31:
            raise InvalidArgument(
                f"PackedSeqParams.to_megatron: {int(self.cu_seqlens_q[-1])} rows, expected fewer"
                " than 2^31, as Megatron's offsets are int32"
            )
        q, kv = (
            torch.as_tensor(lengths, dtype=torch.int32, device=device)
            for lengths in (self.cu_seqlens_q, self.cu_seqlens_kv)
        )
        return theirs(
            qkv_format=self.qkv_format,
            cu_seqlens_q=q,
            cu_seqlens_kv=kv,
            max_seqlen_q=int(self.max_seqlen_q),
            max_seqlen_kv=int(self.max_seqlen_kv),
        )


LayoutFields = Tuple[List[Any], List[Any], Any, Any, Any, List[Any], List[Any]]


def attention_layout(fields: LayoutFields, ragged: bool) -> Union[AttnLayout, RankKvLayout]:
    """From what the compiled part returns."""
    cu_q, cu_kv, max_q, max_kv, num_recv, kv_begin, kv_len = fields
    if ragged and not cu_kv and len(cu_q) > 0:
        return RankKvLayout(tuple(cu_q), tuple(kv_begin), tuple(kv_len), max_q, max_kv, num_recv)
    if ragged:
        return AttnLayout(tuple(cu_q), tuple(cu_kv), max_q, max_kv, num_recv)
    return AttnLayout(cu_q[0], cu_kv[0], max_q, max_kv, num_recv)


def layout_fields(layout: Union[AttnLayout, RankKvLayout]) -> LayoutFields:
    """The inverse of attention_layout for the ragged form."""
    if isinstance(layout, RankKvLayout):
        return (
            list(layout.cu_seqlens_q), [], layout.max_seqlen_q, layout.max_seqlen_kv,
            layout.num_local_seqs_recv, list(layout.kv_begin), list(layout.kv_len),
        )  # fmt: skip
    return (
        list(layout.cu_seqlens_q), list(layout.cu_seqlens_kv), layout.max_seqlen_q,
        layout.max_seqlen_kv, layout.num_local_seqs_recv, [], [],
    )  # fmt: skip
