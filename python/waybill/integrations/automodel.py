"""Context parallelism of NeMo Automodel for models of transformers: batches are cut by its own
``ContextParallelSharder``, and attention is Waybill's:

    attention = SharedAttention(mesh["cp"], model.config)
    model.set_attn_implementation("waybill")
    install(model, attention)       # the hook prepare_model_inputs_for_cp

For the versions in docs/integrations/README.md; importing this needs both packages.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from nemo_automodel.components.distributed.context_parallel.sharder import (
    ContextParallelSharder,
    ShardLayout,
)

from .._arrays import instance
from .._errors import shown
from ..errors import InvalidArgument, Unsupported
from ..torch.attention.plan import Piece
from .transformers import SharedAttention

__all__ = ["install", "sharder_of"]

_WHO = "sharder_of"
# Keys that are sharded are padded with these, where a rank's rows would not be equally many.
_PADDING = {"labels": -100, "position_ids": 0}
# How batches say where packed documents lie; here position_ids do.
_LENGTHS = ("seq_lens", "seq_lens_padded", "cu_seqlens")


def install(model: Any, attention: SharedAttention) -> None:
    """Automodel's recipes get their sharder from the model: this one, from now on."""

    def prepare_model_inputs_for_cp(
        batch: Dict[str, Any], num_chunks: int = 1, **_: Any
    ) -> Dict[str, Any]:
        if num_chunks != 1:
            raise Unsupported(f"{_WHO}: num_chunks = {num_chunks}, expected 1")
        return {"cp_sharder": sharder_of(attention)}

    model.prepare_model_inputs_for_cp = prepare_model_inputs_for_cp


def sharder_of(attention: SharedAttention, device_mesh: Any = None) -> ContextParallelSharder:
    """A sharder of one batch: each rank gets as many rows in a row, wherever documents end; the
    batch gets ``waybill``, which the model's attention reads.

    Documents begin where ``position_ids`` are 0, and with each entry of the batch; all ranks of
    ``cp`` have the same batch, so nothing is gathered.
    """

    def shard_batch(
        cp_mesh: Any,
        tp_mesh: Any,
        batch: Dict[str, Any],
        *,
        loss_mask: Optional[torch.Tensor] = None,
        padding_token_id: int = 0,
    ) -> Tuple[Any, Dict[str, Any], ShardLayout]:
        return _shard(attention, batch, loss_mask, padding_token_id)

    return ContextParallelSharder(device_mesh=device_mesh, shard_batch=shard_batch)


def _shard(
    attention: SharedAttention, batch: Dict[str, Any], loss_mask: Any, padding_token_id: int
) -> Tuple[Any, Dict[str, Any], ShardLayout]:
    who = f"{_WHO}: rank {attention.rank}"
    instance(batch, Mapping, f"{who}: batch", "a dict of tensors")
    tokens = batch.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.numel() == 0:
        shape = getattr(tokens, "shape", None)
        got = shown(tokens) if shape is None else f"of shape {list(shape)}"
        raise InvalidArgument(f"{who}: input_ids is {got}, expected a tensor [batch, sequence]")
    entries, length = tokens.shape
    rows, ranks = tokens.numel(), attention.world_size
    padded = -(-rows // ranks) * ranks
    if padded != rows and entries > 1:
        raise InvalidArgument(
            f"{who}: input_ids have {entries} x {length} tokens, expected a multiple of the"
            f" {ranks} ranks, or one entry, which is padded"
        )
    for name, value in (
        ("attention_mask", batch.get("attention_mask")), ("loss_mask", loss_mask),
        ("position_ids", batch.get("position_ids")),
    ):  # fmt: skip
        _check_like(f"{who}: {name}", value, tokens)
    positions = batch.get("position_ids")
    if positions is None:
        for name in _LENGTHS:
            if batch.get(name) is not None:
                raise InvalidArgument(
                    f"{who}: {name} without position_ids, expected position_ids that begin at 0"
                    " with each document"
                )
        positions = torch.arange(length, device=tokens.device).expand(entries, length)
    elif positions.is_floating_point():
        raise InvalidArgument(f"{who}: position_ids are {positions.dtype}, expected integers")
    _check_mask(who, batch.get("attention_mask"), positions)
    share = padded // ranks
    begin = attention.rank * share
    kept = {**batch, "position_ids": positions}
    if loss_mask is not None:
        kept["loss_mask"] = loss_mask
    fill = {**_PADDING, "input_ids": padding_token_id}
    for name, value in kept.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == tokens.shape:
            flat = value.flatten(0, 1)
            extra = flat.new_full((padded - rows, *flat.shape[1:]), fill.get(name, 0))
            kept[name] = torch.cat([flat, extra])[begin : begin + share][None]
    kept.pop("attention_mask", None)
    starts = positions.flatten() == 0
    starts[::length] = True
    ends = [*starts.nonzero().flatten().tolist(), *range(rows, padded), padded]
    kept["waybill"] = attention.plan(_cuts(ends, share, ranks))
    layout = ShardLayout(
        local_token_global_indices=torch.arange(begin, begin + share, device=tokens.device),
        original_seq_len=rows if entries == 1 else None,
        padded_seq_len=padded,
        input_row_shape=(entries, length) if entries > 1 else None,
    )
    return contextlib.nullcontext, kept, layout


def _cuts(ends: List[int], share: int, ranks: int) -> List[List[Piece]]:
    """Documents between these rows, cut so that each rank has ``share`` rows."""
    held: List[List[Piece]] = [[] for _ in range(ranks)]
    for document, begin in enumerate(ends[:-1]):
        at = begin
        while at < ends[document + 1]:
            stop = min(ends[document + 1], (at // share + 1) * share)
            held[at // share].append(Piece(document, at - begin, stop - at))
            at = stop
    return held


def _check_like(name: str, value: Any, tokens: torch.Tensor) -> None:
    """It has the batch's first two axes, or four axes, which masks may have."""
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 4):
        return
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{name} = {shown(value)}, expected a tensor {list(tokens.shape)}")
    if value.shape != tokens.shape:
        raise InvalidArgument(
            f"{name} has shape {list(value.shape)}, expected {list(tokens.shape)}"
        )


def _check_mask(who: str, mask: Any, positions: torch.Tensor) -> None:
    """Tokens at the end of an entry may be hidden: nothing looks back from them. Masks of packed
    documents number these.
    """
    if mask is None:
        return
    seen = mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if seen is None or bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise Unsupported(
            f"{who}: attention_mask hides more than the ends of entries, expected padding there or"
            " none"
        )
    begins = (mask[:, 1:] != mask[:, :-1]) & seen[:, 1:]
    if bool((begins & (positions[:, 1:] != 0)).any()):
        raise InvalidArgument(
            f"{who}: attention_mask numbers documents that begin where position_ids are not 0,"
            " expected 0 where a document begins"
        )
