"""Recorded cases of DistCA's functions (golden.jsonl), for the faces of the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import generators, index_ops, metadata, routing, simulate
from .parts import expect

Face = Any
_FILE = Path(__file__).with_name("golden.jsonl")


class NumpyFace:
    """The functions for arrays, under their names."""

    def __getattr__(self, name: str) -> Any:
        for module in (routing, simulate, index_ops, generators, metadata):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


def records() -> list[dict[str, Any]]:
    """One case a line: function, inputs, outputs."""
    return [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]


def run(face: Face = None, make: Callable[[Any], Any] = lambda array: array) -> str:
    """Every record; ``make`` turns an array into what the face takes."""
    face = NumpyFace() if face is None else face
    every = records()
    for record in every:
        name = f"{record['fn']} ({record['case']})"
        results, wanted = _CALLS[record["fn"]](face, _Inputs(record["inputs"], face, make), record)
        for got, want in zip(results, wanted):
            expect(_same(got, want), f"{name}: got {got!r}, expected {want!r}")
    return f"{len(every)} cases of {len({record['fn'] for record in every})} functions"


class _Inputs:
    """A record's inputs as a caller has them."""

    def __init__(self, entries: dict[str, Any], face: Face, make: Callable[[Any], Any]) -> None:
        self._entries, self._face, self._make = entries, face, make

    def __call__(self, *names: str) -> list[Any]:
        return [self._made(self._entries[name]) for name in names]

    def _made(self, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        if "ragged" in entry:
            return [self._made(one) for one in entry["ragged"]]
        if "dst_rank" in entry:
            return self._face.Metadata(**{key: self._made(value) for key, value in entry.items()})
        return self._make(_array(entry))


def _array(entry: dict[str, Any]) -> Any:
    return np.array(entry["data"], dtype=entry["dtype"]).reshape(entry["shape"])


def _same(got: Any, want: Any) -> bool:
    """Arrays, metadata, lists of them, and plain values, against a record's entry."""
    if isinstance(want, dict) and "ragged" in want:
        return len(got) == len(want["ragged"]) and all(map(_same, got, want["ragged"]))
    if isinstance(want, dict) and "dst_rank" in want:
        return all(_same(getattr(got, name), value) for name, value in want.items())
    if not isinstance(want, dict):
        return bool(got == want)
    expected = _array(want)
    array = np.asarray(got)
    return (
        array.dtype == expected.dtype
        and array.shape == expected.shape
        and bool((array == expected).all())
    )


def _plain(name: str, *inputs: str) -> Callable[..., Any]:
    """Of functions with one result."""

    def call(face: Face, given: _Inputs, record: Any) -> Any:
        (want,) = record["outputs"].values()
        return [getattr(face, name)(*given(*inputs))], [want]

    return call


def _lengths(face: Face, given: _Inputs, record: Any) -> Any:
    world, sequences, total, uniforms = given("world_size", "num_seqs", "total_len", "uniforms")
    made = face.gen_seq_lens(world, sequences, total, uniforms=uniforms)
    return [made], [record["outputs"]["seq_len"]]


def _tables(face: Face, given: _Inputs, record: Any) -> Any:
    made = face.compute_metadata(*given("seq_len", "global_dispatch"))
    return made, [record["outputs"][name] for name in ("fwd", "rev")]


def _kv_tables(face: Face, given: _Inputs, record: Any) -> Any:
    names = (
        "kv_to_q_mapping", "kv_to_q_rank", "kv_context_size", "q_to_num_kv_seq",
        "q_to_num_kv_token", "seq_len", "num_seqs", "q_dispatch",
    )  # fmt: skip
    fwd, rev, (ids,) = face.compute_metadata_kv(*given(*names), return_intermediate=True)
    return [fwd, rev, ids], [
        record["outputs"][name] for name in ("fwd", "rev", "kv_dst_global_seq_id")
    ]


def _layout(face: Face, given: _Inputs, record: Any) -> Any:
    names = ("seq_shard_len", "seq_shard_cumsum", "dispatch", "prepend_zero", "shard_to_tuple")
    made = face.compute_attn_layout_seqlens(*given(*names))
    return list(made), [record["outputs"][name] for name in made._fields]


def _slices(face: Face, given: _Inputs, record: Any) -> Any:
    table, ranks = given("metadata", "ranks")
    return [table.get_slice(rank) for rank in ranks], record["outputs"]["slices"]


def _device_form(face: Face, given: _Inputs, record: Any) -> Any:
    (table,) = given("metadata")
    return [table.normalize_dtype()], [record["outputs"]["metadata"]]


_CALLS: dict[str, Callable[..., Any]] = {
    "exclusive_cumsum": _plain("exclusive_cumsum", "tensor", "dim"),
    "prepend_zero_fn": _plain("prepend_zero_fn", "tensor", "dim"),
    "mask_by_neg": _plain("mask_by_neg", "tensor", "mask"),
    "index_put_with_neg_padding_1d": _plain(
        "index_put_with_neg_padding_1d", "tensor", "src", "index"
    ),
    "gen_seq_lens": _lengths,
    "compute_metadata": _tables,
    "compute_metadata_kv": _kv_tables,
    "compute_attn_layout_seqlens": _layout,
    "Metadata.get_slice": _slices,
    "Metadata.normalize_dtype": _device_form,
    "orchestrate_simulate": _plain("orchestrate_simulate", "tensor", "output_tensor", "metadata"),
    "simulate_communication": _plain("simulate_communication", "tensors", "metadata"),
}
