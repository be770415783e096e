"""The loss that a model of transformers computes itself, where its rows lie on several ranks."""

from __future__ import annotations

import functools
from typing import Any, Callable

from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..errors import InvalidArgument

__all__ = ["guard_losses"]

_own: Any = PreTrainedModel.__dict__["loss_function"]


def guard_losses(name: str) -> None:
    """From now on the losses of transformers refuse what would be a wrong number where a model's
    attention is ``name``: labels that are shifted by rows, and means over one rank's labels. Those
    of other models, and functions of the user's, stay as they are.
    """

    def loss_function(model: Any) -> Any:
        found = _own.fget(model)
        uses = getattr(model.config.get_text_config(), "_attn_implementation", None) == name
        if not uses or found not in LOSS_MAPPING.values():
            return found
        return _guarded(found, type(model).__name__)

    PreTrainedModel.loss_function = property(loss_function, _own.fset)


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
