"""The interface of DeepEP's ``Buffer``, and of ``ElasticBuffer`` for experts, served by Waybill:
which callers it serves is a table in docs/integrations/deep_ep.md.

Rows, sums and their order are those of ``waybill.torch.moe.EPAll2AllLayer``, on which all of it is
built: on GPUs of one host, and on CPU ranks.
"""

from .buffer import Buffer
from .config import Config, set_max_tokens
from .elastic import ElasticBuffer, EPHandle
from .events import EventHandle, EventOverlap
from .install import install, uninstall
from .layout import topk_idx_t

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "install",
    "set_max_tokens",
    "topk_idx_t",
    "uninstall",
]
