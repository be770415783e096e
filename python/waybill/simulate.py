"""Moving rows in one process, as a dispatch on real hardware must."""

from __future__ import annotations

import math
import sys
import threading
from contextlib import contextmanager
from typing import Any, Iterator, NoReturn, Sequence, TypeVar

import numpy as np

from . import _core
from ._arrays import (
    AnyArray,
    ArrayLike,
    IntArray,
    as_numpy,
    integer,
    library_dtype,
    payload,
    sequence,
)
from ._errors import shown
from .errors import InvalidArgument, NotThreeAxes, RankOutOfRange, ShapeMismatch, WrongType
from .metadata import Metadata, require_metadata

__all__ = [
    "orchestrate_simulate",
    "simulate_communication",
    "source_rows",
    "sum_kv_copies",
]  # and test_qkv_dispatch, which both faces have as it is


_Output = TypeVar("_Output")
_AFTER_S = 2.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Writes what is going on, once it has taken two seconds, where standard error is a terminal.
    The line is rewritten each second, and is gone at the end.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    writer = threading.Thread(target=_write, args=(what, ended), daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _write(what: str, ended: threading.Event) -> None:
    seconds, wait = int(_AFTER_S), _AFTER_S
    while not ended.wait(wait):
        print(f"\rwaybill: {what}, {seconds} s ...", end="", file=sys.stderr, flush=True)
        seconds, wait = seconds + 1, 1.0
    if wait != _AFTER_S:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def orchestrate_simulate(
    tensor: ArrayLike,
    output_tensor: _Output,
    metadata: Metadata,
    *,
    overlap: str = "last_wins",
    num_threads: int = 0,
) -> _Output:
    """Moves rows between ranks as ``metadata`` says; returns ``output_tensor``, written in place.

    Args:
        tensor: (W, n, H), the rows of every rank, back to back from row 0. Any dtype and strides.
        output_tensor: (W, m, H), the same dtype; rows that nothing addresses keep what they hold.
        metadata: only dst_rank, dst_offset and seq_len are read, of any dtype of integers; a
            negative rank is no destination.
        overlap: what two copies that write one row mean: "last_wins", the later one in the order
            (source rank, shard, copy) stays, as in DistCA; or "reject", an error.
        num_threads: 0 is all cores; the result does not depend on it.

    Raises:
        ShapeMismatch: (a RuntimeError) shapes, dtypes, offsets or lengths that do not fit; the text
            has source rank, destination rank, shard, copy, offset, length, both shapes and the rows
            consumed before. output_tensor is then unchanged.
        RankOutOfRange: (an IndexError) a destination of W or more.
        NotThreeAxes: (an AssertionError) ``tensor`` has not three axes.
    """
    overlap = checked_overlap(overlap, "orchestrate_simulate")
    source = as_numpy(tensor, "orchestrate_simulate: tensor")
    output = writable(output_tensor, "orchestrate_simulate: output_tensor")
    run_simulation(
        *payload(source, "orchestrate_simulate: tensor"),
        *payload(output, "orchestrate_simulate: output_tensor"), metadata, overlap, num_threads,
    )  # fmt: skip
    return output_tensor


def simulate_communication(
    tensors: Sequence[ArrayLike], metadata: Metadata, *, overlap: str = "last_wins"
) -> list[AnyArray]:
    """orchestrate_simulate for ranks with different numbers of rows, into new arrays.

    Args:
        tensors: W arrays (n_w, ...) of one dtype; axes after the first are carried along.

    Returns:
        W arrays (R_w, ...), R_w the total of num_recv_tokens[w].
    """
    overlap = checked_overlap(overlap, "simulate_communication")
    sequence(tensors, "simulate_communication: tensors", "one array for each rank")
    sources = [as_numpy(t, f"simulate_communication: tensors[{i}]") for i, t in enumerate(tensors)]
    pairs = [payload(as_matrix(s), "simulate_communication: tensors") for s in sources]
    flat, dtypes = [bits for bits, _ in pairs], [dtype for _, dtype in pairs]
    received = run_communication(flat, dtypes, metadata, overlap)
    return [
        rows.view(s.dtype).reshape(len(rows), *s.shape[1:]) for rows, s in zip(received, sources)
    ]


def source_rows(
    tensor_shape: Sequence[int],
    output_shape: Sequence[int],
    metadata: Metadata,
    *,
    overlap: str = "last_wins",
) -> IntArray:
    """The rows that orchestrate_simulate would move, as a gather, for tensors of any framework and
    device.

    Returns:
        (W, m) int64: for every row of the output the row of the tensor that ends there,
        w * n + row, or -1 where none does.
    """
    overlap = checked_overlap(overlap, "source_rows")
    fields = require_metadata(metadata, "source_rows")._moves()
    shapes = [
        [integer(extent, f"source_rows: {name}[{i}]") for i, extent in enumerate(shape)]
        for name, shape in (
            ("tensor_shape", sequence(tensor_shape, "source_rows: tensor_shape", "[W, n, H]")),
            ("output_shape", sequence(output_shape, "source_rows: output_shape", "[W, m, H]")),
        )
    ]
    try:
        return _core.source_rows(shapes[0], shapes[1], fields, overlap)
    except InvalidArgument as error:
        _raise_as_simulation_error(error, metadata, shapes[0])


def sum_kv_copies(
    planes: ArrayLike, metadata: Metadata, rank: int, output: Any = None, num_threads: int = 0
) -> AnyArray:
    """Sums the gradients of the copies of a rank's K (or V) rows after the reverse dispatch.

    Row x is the sum over copies c, in that order, of row c * T + x of ``planes`` (C * T, H), where
    the row's shard uses copy c. Sums run in float32 (float64 for float64), are rounded once.

    Args:
        metadata: the reverse metadata of KV, of all ranks or the slice of ``rank``.
        output: (T, H), the dtype of ``planes`` or float32; None makes one of the dtype of planes.
    """
    source = as_numpy(planes, "sum_kv_copies: planes")
    if output is None:
        rows = gradient_rows(source.shape, metadata, rank)
        output = np.empty((rows, *source.shape[1:]), dtype=source.dtype)
    target = writable(output, "sum_kv_copies: output")
    run_sum(
        *payload(source, "sum_kv_copies: planes"), *payload(target, "sum_kv_copies: output"),
        metadata, rank, num_threads,
    )  # fmt: skip
    return output


def test_qkv_dispatch(args: Any = None, **overrides: Any) -> None:
    """Sends a random plan's payload forward and back and checks every element.

    Args:
        args: anything with attributes world_size, num_seqs, max_seq_shard, num_tokens, hidden_size
            and seed, such as DistCA's command line; those that lack have DistCA's
            defaults 2, 4, 2, 1024, 128, 0.
        overrides: the same by keyword.

    Raises:
        AssertionError: naming every finding.
    """
    defaults = {
        "world_size": 2, "num_seqs": 4, "max_seq_shard": 2, "num_tokens": 1024, "hidden_size": 128,
        "seed": 0,
    }  # fmt: skip
    unknown = sorted(set(overrides) - set(defaults))
    if unknown:
        raise InvalidArgument(
            f"test_qkv_dispatch: got {unknown}, expected some of {list(defaults)}"
        )
    values: Any = {name: getattr(args, name, value) for name, value in defaults.items()}
    world, sequences, shards, tokens, hidden, seed = {**values, **overrides}.values()
    with progress(f"test_qkv_dispatch on {world} ranks"):
        findings, _ = _core.test_qkv_dispatch(
            world, tokens, sequences, shards, hidden, hidden, seed
        )
    if findings:
        raise AssertionError("test_qkv_dispatch: " + "; ".join(text for *_, text in findings))


def checked_overlap(value: Any, who: str) -> str:
    """A text; which ones there are the compiled part knows."""
    if not isinstance(value, str):
        raise WrongType(f'{who}: overlap = {shown(value)}, expected "last_wins" or "reject"')
    return value


def writable(output: Any, name: str) -> AnyArray:
    """The caller's own memory; a copy would take the result away from them."""
    if not isinstance(output, np.ndarray) and not hasattr(output, "__dlpack__"):
        raise InvalidArgument(f"{name} is a {type(output).__name__}, expected an array to write to")
    array = as_numpy(output, name)
    if not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only, expected an array to write to")
    return array


def as_matrix(rows: Any) -> Any:
    """(n, H) of an array or tensor (n, ...); H may be 0, and so may n."""
    if rows.ndim == 0:
        raise ShapeMismatch("simulate_communication: got a scalar, expected tensors (n, ...)")
    return rows if rows.ndim == 2 else rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def gradient_rows(planes_shape: Sequence[int], metadata: Metadata, rank: int) -> int:
    """T of sum_kv_copies for a new output; held against planes, since tables may be wrong."""
    who = "sum_kv_copies"
    fields = require_metadata(metadata, who)._fields()
    mask, lens = fields[4:6]
    if mask is None or lens is None:
        raise InvalidArgument(
            f"{who}: metadata has no seq_recv_mask or recv_seq_lens, expected those of the reverse"
            " of a dispatch with copies"
        )
    if lens.ndim == 2:
        if not 0 <= integer(rank, f"{who}: rank") < len(lens):
            raise InvalidArgument(f"{who}: rank = {shown(rank)}, expected 0..{len(lens) - 1}")
        lens = lens[int(rank)]
    rows = int(sum(lens.reshape(-1).tolist()))
    copies = mask.shape[-1] if mask.ndim else 0
    if len(planes_shape) != 2 or planes_shape[0] != copies * rows or rows < 0:
        raise InvalidArgument(
            f"{who}: planes has shape {list(planes_shape)}, expected [{copies} * {rows}, hidden]"
        )
    return rows


def run_simulation(
    source: AnyArray, source_dtype: str, output: AnyArray, output_dtype: str, metadata: Metadata,
    overlap: str, num_threads: int,
) -> None:  # fmt: skip
    """orchestrate_simulate on integers of the elements' size, each with its dtype's name."""
    if source_dtype != output_dtype and source.itemsize == output.itemsize:
        raise ShapeMismatch(
            f"orchestrate_simulate: output_tensor has dtype {output_dtype}, expected"
            f" {source_dtype}, that of tensor"
        )
    fields = require_metadata(metadata, "orchestrate_simulate")._moves()
    try:
        _core.orchestrate_simulate(
            source, library_dtype(source_dtype, source.itemsize),
            output, library_dtype(output_dtype, output.itemsize),
            fields, overlap, num_threads,
        )  # fmt: skip
    except InvalidArgument as error:
        _raise_as_simulation_error(error, metadata, source.shape)


def run_sum(
    planes: AnyArray, planes_dtype: str, output: AnyArray, output_dtype: str, metadata: Metadata,
    rank: int, num_threads: int,
) -> None:  # fmt: skip
    """sum_kv_copies on integers of the elements' size."""
    _core.sum_kv_copies(
        planes, library_dtype(planes_dtype, planes.itemsize),
        output, library_dtype(output_dtype, output.itemsize),
        require_metadata(metadata, "sum_kv_copies")._fields(),
        integer(rank, "sum_kv_copies: rank"), num_threads,
    )  # fmt: skip


def run_communication(
    flat: Sequence[AnyArray], dtypes: Sequence[str], metadata: Metadata, overlap: str
) -> list[AnyArray]:
    """simulate_communication on (n_w, H) integers of the elements' size."""
    if len(set(dtypes)) > 1:
        raise ShapeMismatch(
            f"simulate_communication: tensors have dtypes {sorted(set(dtypes))}, expected one dtype"
        )
    dtype = library_dtype(dtypes[0], flat[0].itemsize) if flat else "uint8"
    fields = require_metadata(metadata, "simulate_communication")._moves(with_counts=True)
    try:
        return _core.simulate_communication(flat, dtype, fields, overlap, 0)
    except InvalidArgument as error:
        _raise_as_simulation_error(error, metadata, [len(flat), 0, 0])


def _raise_as_simulation_error(
    error: InvalidArgument, metadata: Metadata, tensor_shape: Sequence[int]
) -> NoReturn:
    """Raises the error under the class that callers of DistCA catch, with their names."""
    text = str(error).replace(
        "orchestrate_simulate: output ", "orchestrate_simulate: output_tensor "
    )
    if len(tensor_shape) != 3:
        raise NotThreeAxes(text) from None
    if "destination rank = " in text and "expected -1 (none)" in text:
        raise RankOutOfRange(text) from None
    raise ShapeMismatch(text) from None
