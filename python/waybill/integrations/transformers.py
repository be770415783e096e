"""Attention of Hugging Face transformers over packed documents that lie on several ranks:

    attention = SharedAttention(group, model.config)    # collective, once
    model.set_attn_implementation("waybill")
    batch = attention.plan(attention.gather(lengths))   # of each batch
    model(tokens[None], position_ids=batch.position_ids(), waybill=batch, use_cache=False)

For the version in docs/integrations/README.md; importing this needs transformers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from .._arrays import instance
from .._errors import said_by, shown
from .._graphs import outside_graphs
from ..errors import InvalidArgument, Unsupported
from ..torch import BatchPlan, BatchPlanner, ContextParallelAttention
from ..torch.attention.plan import RankPieces
from ..torch.kernels import AttentionShape

__all__ = ["Chunk", "PlannedBatch", "SharedAttention", "attention_forward", "no_mask", "windows_of"]


_own: Any = PreTrainedModel.__dict__["loss_function"]


def _loss_function(model: Any) -> Any:
    """Losses of transformers refuse what would be a wrong number where a model's attention is
    "waybill": labels that are shifted by rows, and means over one rank's labels. Those of other
    models, and functions of the user's, stay as they are.
    """
    found = _own.fget(model)
    uses = getattr(model.config.get_text_config(), "_attn_implementation", None) == "waybill"
    if not uses or found not in LOSS_MAPPING.values():
        return found
    return _guarded(found, type(model).__name__)


def _guarded(loss: Callable[..., Any], who: str) -> Callable[..., Any]:
    @functools.wraps(loss)
    def guarded(*args: Any, **given: Any) -> Any:
        if loss is ForCausalLMLoss and given.get("shift_labels") is None:
            raise InvalidArgument(
                f"{who}: labels without shift_labels, expected shift_labels=labels, both as of"
                " waybill.torch.pack: labels alone are shifted by one row, over the ends of"
                " documents and of ranks"
            )
        batch = given.get("waybill")
        ranks = None if batch is None else batch.attention.world_size
        if given.get("num_items_in_batch") is None and ranks != 1:
            raise InvalidArgument(
                f"{who}: num_items_in_batch is None on one of {ranks or 'several'} ranks, expected"
                " the number of labels of all ranks, or a loss that you compute of the logits: the"
                " mean over a rank's own labels is not that over all"
            )
        return loss(*args, **given)

    return guarded


_WHO = "waybill attention"
# Those of the interface's keywords that would change what is computed.
_REFUSED = ("softcap", "position_bias", "s_aux", "cache", "block_mask")


class Chunk(NamedTuple):
    """Attention that begins anew after so many tokens of a document, as in Llama 4's layers."""

    tokens: int


#: Which keys of a document a query of a layer meets: the last n, those of its chunk, or all (None).
Window = Union[int, Chunk, None]


def _known_kinds(config: Any) -> Dict[str, Window]:
    """By the names of ``config.layer_types``."""
    known: Dict[str, Window] = {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
    }
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:
        known["chunked_attention"] = Chunk(chunk)
    return known


def windows_of(config: Any) -> List[Window]:
    """The windows of a model's layers, each once; None is without one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [getattr(config, "sliding_window", None)]
    known = _known_kinds(config)
    for layer, kind in enumerate(kinds):
        if kind not in known:
            raise Unsupported(
                f"SharedAttention: config.layer_types[{layer}] = {kind!r}, expected one of"
                f" {', '.join(map(repr, known))}"
            )
    return list(dict.fromkeys(known[kind] for kind in kinds))


class SharedAttention:
    """Attention that all layers of a model share: a ContextParallelAttention for each window or
    chunk that they have.

    Args:
        ranks: a World, a process group, a DeviceMesh of one dimension, or None.
        config: of the model: its heads, their size, windows and dtype.
        options: of ContextParallelAttention; before what the config says (``heads``, ``scale``).
    """

    def __init__(self, ranks: Any, config: Any, **options: Any) -> None:
        if not hasattr(config, "get_text_config"):
            raise InvalidArgument(
                f"SharedAttention: config = {shown(config)}, expected that of a model"
            )
        self._config = config = config.get_text_config()
        if getattr(config, "attn_temperature_tuning", False):
            raise Unsupported(
                "SharedAttention: config.attn_temperature_tuning = True, expected False: the model"
                " scales queries by their row, not by their position in a document"
            )
        heads = config.num_attention_heads
        given: Dict[str, Any] = {
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "dtype": getattr(config, "dtype", None) or torch.float32,
        }
        given.update(options)
        self.modules: Dict[Window, ContextParallelAttention] = {}
        for window in windows_of(config):
            with said_by("SharedAttention"):
                of = "chunk" if isinstance(window, Chunk) else "window"
                reach: Dict[str, Any] = {of: window.tokens if isinstance(window, Chunk) else window}
                self.modules[window] = ContextParallelAttention(ranks, **reach, **given)
            ranks = self.modules[window].world
        self._first = next(iter(self.modules.values()))
        world = self._first.world
        self.rank, self.world_size, self.device = world.rank, world.world_size, self._first.device

    @property
    def planners(self) -> Dict[Window, BatchPlanner]:
        """By window; a worker of a DataLoader may plan with them."""
        return {window: module.planner for window, module in self.modules.items()}

    def gather(self, held: RankPieces) -> List[Any]:
        """Collective: as of ContextParallelAttention."""
        with said_by("SharedAttention.gather"):
            return self._first.gather(held)

    def plan(self, pieces: Sequence[Any]) -> PlannedBatch:
        """The plans of a batch, the same on all ranks."""
        with said_by("SharedAttention.plan"):
            plans = {window: p.plan(pieces) for window, p in self.planners.items()}
        return self.batch(plans)

    def batch(self, plans: Mapping[Window, BatchPlan]) -> PlannedBatch:
        """The batch of plans that were made elsewhere, one for each of ``planners``."""
        who = f"SharedAttention.batch: rank {self.rank}"
        instance(plans, Mapping, f"{who}: plans", "a dict of plans by window")
        for window, plan in plans.items():
            instance(plan, BatchPlan, f"{who}: plans[{window}]", "a BatchPlan, as of planners")
        missing = [window for window in self.modules if window not in plans]
        if missing:
            raise InvalidArgument(
                f"{who}: plans have none for window {missing[0]}, expected one for each of"
                f" {list(self.modules)}"
            )
        found = getattr(self._config, "_attn_implementation", None)
        if found != "waybill":
            raise InvalidArgument(
                f"{who}: the attention of config is {found!r}, expected that of model.config behind"
                " model.set_attn_implementation('waybill'), which takes models with an attention"
                " interface: another attention would not notice the plans"
            )
        return PlannedBatch(self, plans)

    def close(self) -> None:
        """Collective: gives the windows back."""
        for module in self.modules.values():
            module.close()


class PlannedBatch:
    """One batch, an argument of the model's forward: ``waybill=batch``."""

    def __init__(self, attention: SharedAttention, plans: Mapping[Window, BatchPlan]) -> None:
        self.attention, self.plans = attention, dict(plans)
        self.first = next(iter(self.plans.values()))
        self._positions: Optional[torch.Tensor] = None
        self._asked = False  # for its positions, by the user
        self._right: Any = lambda: None  # the tensor that was found right, weakly

    def position_ids(self) -> torch.Tensor:
        """[1, rows]: positions in the documents, for the model's rotary embeddings."""
        self._asked = True
        return self._of_documents()

    def _of_documents(self) -> torch.Tensor:
        if self._positions is None:
            first = self.first.positions(self.attention.rank, self.attention.device)
            self._positions = first[None]
        return self._positions

    def check_positions(self, given: Any, who: str) -> None:
        """Once for a tensor: the model counts rows where none are given. Those that do not reach
        attention cannot be looked at; then the batch must have been asked for its own.
        """
        if given is None and not self._asked:
            raise InvalidArgument(
                f"{who}: position_ids did not reach attention, expected"
                " position_ids=batch.position_ids()"
            )
        mine = self._of_documents()
        if given is mine or given is self._right() or not isinstance(given, torch.Tensor):
            return
        if given.shape != mine.shape:
            return  # it has several axes: not rows of documents
        if not torch.equal(given.to(mine.device), mine):
            raise InvalidArgument(
                f"{who}: position_ids are not those of the documents, expected"
                " position_ids=batch.position_ids()"
            )
        self._right = weakref.ref(given)

    def __deepcopy__(self, memo: Any) -> PlannedBatch:
        """Data of one batch: shared."""
        return self


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    is_causal: Optional[bool] = None,
    waybill: Optional[PlannedBatch] = None,
    **options: Any,
) -> Tuple[torch.Tensor, None]:
    """Collective: what AttentionInterface calls. ([1, rows, heads, head_dim], None)"""
    expected = "a PlannedBatch: call the model with waybill=attention.plan(...)"
    instance(waybill, PlannedBatch, f"{_WHO}: waybill", expected)
    assert waybill is not None
    shared = waybill.attention
    who = f"{_WHO}: rank {shared.rank}"
    _refuse(who, module, attention_mask, dropout, is_causal, options)
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise InvalidArgument(
            f"{who}: query {tuple(query.shape)}, key {tuple(key.shape)}, expected [1, heads, rows,"
            " head_dim] of the same rows: packed documents are one batch entry, without a cache"
        )
    window = _window_of(module, sliding_window)
    if window not in shared.modules:
        raise InvalidArgument(
            f"{who}: sliding_window = {window}, expected one of {list(shared.modules)}, as"
            " of the config that SharedAttention was made of"
        )
    waybill.check_positions(options.get("position_ids"), who)
    attention = shared.modules[window]
    _check_heads(who, attention.planner.shape, query, key, value)
    scale = attention.planner.shape.scale
    if scaling is not None and abs(scaling - scale) > 1e-6 * scale:
        raise InvalidArgument(
            f"{who}: scaling = {scaling}, expected {scale}: say SharedAttention(..., scale=...)"
        )
    # Views: rows were in front before the model swapped them with heads.
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return _attend(attention, waybill.plans[window], q, k, v)[None], None


_attend = outside_graphs(said_by(_WHO)(ContextParallelAttention.__call__))


def _window_of(module: Any, sliding_window: Optional[int]) -> Window:
    """Models hand windows to the interface, chunks to their masks alone."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and layer is not None and kinds[layer] == "chunked_attention":
        return _known_kinds(config)["chunked_attention"]
    return sliding_window


def _check_heads(who: str, shape: AttentionShape, *tensors: torch.Tensor) -> None:
    """By the names that the caller knows: of the interface, and of SharedAttention's options."""
    expected = (
        ("query", "heads", shape.heads, "head_dim", shape.head_dim),
        ("key", "kv_heads", shape.kv_heads, "head_dim", shape.head_dim),
        ("value", "kv_heads", shape.kv_heads, "v_head_dim", shape.v_head_dim),
    )
    for tensor, (name, heads_name, heads, size_name, size) in zip(tensors, expected):
        if (tensor.shape[1], tensor.shape[3]) != (heads, size):
            raise InvalidArgument(
                f"{who}: {name} {tuple(tensor.shape)}, expected {heads} heads of {size}: say"
                f" SharedAttention(..., {heads_name}={tensor.shape[1]},"
                f" {size_name}={tensor.shape[3]})"
            )


def _refuse(
    who: str, module: Any, mask: Any, dropout: float, is_causal: Any, options: Dict[str, Any]
) -> None:
    if mask is not None:
        raise Unsupported(f"{who}: got an attention_mask, expected None: documents have no padding")
    if dropout:
        raise Unsupported(f"{who}: dropout = {dropout}, expected 0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise Unsupported(f"{who}: is_causal = False, expected True")
    for name in _REFUSED:
        if options.get(name) is not None:
            raise Unsupported(f"{who}: {name} is {type(options[name]).__name__}, expected None")


def no_mask(*args: Any, attention_mask: Optional[torch.Tensor] = None, **options: Any) -> None:
    """AttentionMaskInterface calls it: the plan says it all. A mask that hides tokens would be
    dropped silently otherwise.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Unsupported(
            f"{_WHO}: attention_mask hides tokens, expected None: leave padding out of the batch"
        )


AttentionInterface.register("waybill", attention_forward)
AttentionMaskInterface.register("waybill", no_mask)
PreTrainedModel.loss_function = property(_loss_function, _own.fset)
