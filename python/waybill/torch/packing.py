"""Documents back to back, without padding: tokens, labels, positions, and which piece is which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from .._arrays import int64
from .._graphs import outside_graphs
from ..errors import InvalidArgument
from ._tensors import require_device, require_rows
from .batch_plan import Piece

__all__ = ["PackedBatch", "pack", "unpack"]


class PackedBatch(NamedTuple):
    """Rows of some documents, or of a part of them."""

    tokens: torch.Tensor  #: (rows, ...)
    #: (rows, ...): the next token of the same document; its last has none. int64 of integers
    labels: torch.Tensor
    positions: torch.Tensor  #: (rows,): in the document, for rotary embeddings
    pieces: list[Union[int, Piece]]  #: for ContextParallelAttention.gather

    def cut(self, begin: int, end: int) -> PackedBatch:
        """Rows [begin, end), such as one rank's; of documents with numbers, as they lie on several
        ranks then.
        """
        rows = len(self.tokens)
        begin, end = int64(begin, "cut: begin"), int64(end, "cut: end")
        if not 0 <= begin <= end <= rows:
            raise InvalidArgument(f"cut: rows {begin}..{end}, expected within 0..{rows}")
        pieces: list[Union[int, Piece]] = []
        at = 0
        for piece in self.pieces:
            if not isinstance(piece, Piece):
                raise InvalidArgument(
                    "cut: the documents have no numbers, by which other ranks know them: expected"
                    " pack(documents, first_document=...)"
                )
            first, last = max(begin, at), min(end, at + piece.length)
            if first < last:
                pieces.append(Piece(piece.document, piece.offset + first - at, last - first))
            at += piece.length
        rows_of = slice(begin, end)
        return PackedBatch(
            self.tokens[rows_of], self.labels[rows_of], self.positions[rows_of], pieces
        )

    def to(self, device: Any) -> PackedBatch:
        """The same with its tensors on a device."""
        place = require_device(device, "PackedBatch.to: device")
        tokens, labels, positions = (t.to(place) for t in self[:3])
        return PackedBatch(tokens, labels, positions, self.pieces)


@outside_graphs
def pack(
    documents: Iterable[torch.Tensor],
    *,
    first_document: Optional[int] = None,
    ignored: int = -100,
) -> PackedBatch:
    """Packs documents [tokens, ...] one after another; empty ones are left out.

    Args:
        first_document: numbers the documents from it on, where they are to be cut among ranks:
            the same number for a document on all of them. Without, they stay whole.
        ignored: the label of a document's last token; cross_entropy's ignore_index.
    """
    is_list = isinstance(documents, Iterable) and not isinstance(documents, (Mapping, str, bytes))
    if not is_list or getattr(documents, "ndim", 1) == 0:
        raise InvalidArgument(f"pack: documents is a {type(documents).__name__}, expected a list")
    ignored = int64(ignored, "pack: ignored")
    kept = [require_rows(d, f"pack: documents[{i}]") for i, d in enumerate(documents)]
    _check_alike(kept)
    kept = [document for document in kept if len(document) > 0]
    if not kept:
        none = torch.empty(0, dtype=torch.int64)
        return PackedBatch(none, none.clone(), none.clone(), [])
    tokens = torch.cat(kept)
    # Tokens of few bits, or without a sign, have no number for "ignored".
    floats = tokens.is_floating_point() or tokens.is_complex()
    labels = torch.empty_like(tokens, dtype=None if floats else torch.int64)
    labels[:-1] = tokens[1:]
    ends = torch.tensor([len(document) for document in kept]).cumsum(0)
    labels[ends.to(tokens.device) - 1] = ignored
    positions = torch.cat([torch.arange(len(d), device=tokens.device) for d in kept])
    pieces: list[Union[int, Piece]] = [len(document) for document in kept]
    if first_document is not None:
        first = int64(first_document, "pack: first_document")
        if first < 0:
            raise InvalidArgument(f"pack: first_document = {first}, expected >= 0")
        pieces = [Piece(first + i, 0, len(document)) for i, document in enumerate(kept)]
    return PackedBatch(tokens, labels, positions, pieces)


def _check_alike(documents: list[torch.Tensor]) -> None:
    """One dtype, device and shape of rows: else numbers would change, or torch would say less."""
    for i, document in enumerate(documents):
        for name, got, expected in (
            ("dtype", document.dtype, documents[0].dtype),
            ("device", document.device, documents[0].device),
            ("rows of shape", list(document.shape[1:]), list(documents[0].shape[1:])),
        ):
            if got != expected:
                raise InvalidArgument(
                    f"pack: documents[{i}] has {name} {got}, expected {expected}, as documents[0]"
                )


@outside_graphs
def unpack(rows: torch.Tensor, pieces: Sequence[Union[int, Piece]]) -> list[torch.Tensor]:
    """The rows of each piece, views: the inverse of pack for whatever was computed from it."""
    require_rows(rows, "unpack: rows")
    if not isinstance(pieces, Sequence):
        raise InvalidArgument(f"unpack: pieces is a {type(pieces).__name__}, expected a list")
    lengths = [
        int64(
            piece[2] if isinstance(piece, tuple) and len(piece) == 3 else piece,
            f"unpack: pieces[{i}]",
        )
        for i, piece in enumerate(pieces)
    ]
    if min(lengths, default=0) < 0:
        raise InvalidArgument(f"unpack: pieces hold the length {min(lengths)}, expected >= 0")
    if sum(lengths) != len(rows):
        raise InvalidArgument(f"unpack: {len(rows)} rows, expected {sum(lengths)}, as of pieces")
    return list(torch.split(rows, lengths))
