"""Names of version 0.1 that have moved: pickles, and programs that import them, find them still.
Names that other libraries have: who asks for them here reads where they are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import NoReturn

#: The module of version 0.1, and the one that has its names now.
MOVED = {
    "waybill._dispatcher": "waybill.sequence_dispatcher",
    "waybill.attention_costs": "waybill.costs",
    "waybill.generators": "waybill.routing",
    "waybill.index_ops": "waybill.routing",
    "waybill.layouts": "waybill.metadata",
    "waybill.links": "waybill.costs",
    "waybill.sparse": "waybill.plans",
    "waybill.validation": "waybill.plans",
    "waybill.torch.batch_plan": "waybill.torch.attention.plan",
    "waybill.torch.calibrate": "waybill.torch.attention.calibrate",
    "waybill.torch.context_parallel": "waybill.torch.attention.module",
    "waybill.torch.generators": "waybill.torch.functions",
    "waybill.torch.index_ops": "waybill.torch.functions",
    "waybill.torch.kernels._seam": "waybill.torch.kernels.seam",
    "waybill.torch.kernels.dot_product": "waybill.torch.kernels.backends",
    "waybill.torch.kernels.flash": "waybill.torch.kernels.backends",
    "waybill.torch.kernels.flex": "waybill.torch.kernels.backends",
    "waybill.torch.kernels.varlen": "waybill.torch.kernels.backends",
    "waybill.torch.metadata": "waybill.torch.functions",
    "waybill.torch.moe.context": "waybill.torch.experts.context",
    "waybill.torch.moe.expert_parallel": "waybill.torch.experts.expert_parallel",
    "waybill.torch.moe.grouped": "waybill.torch.experts.grouped",
    "waybill.torch.moe.layer": "waybill.torch.experts.layer",
    "waybill.torch.packing": "waybill.torch.attention.plan",
    "waybill.torch.routing": "waybill.torch.functions",
    "waybill.torch.simulate": "waybill.torch.functions",
    "waybill.torch.start": "waybill.torch.world",
}


_EXPERTS = "waybill.torch.moe"
_DEEP_EP = "waybill.integrations.deep_ep"
_KERNEL = "a kernel of a dispatch or combine: EPAll2AllLayer queues it"
_ATTENTION = "a call of ContextParallelAttention by a plan"
_HOME = "not needed: rows of ContextParallelAttention stay at home"
#: Modules that say where these names are.
_ASKED = ("waybill", "waybill.moe", "waybill.torch", _EXPERTS)

#: The name in DistCA, Triton-distributed, DeepEP, Megatron, MagiAttention or ring-flash-attention,
#: and where it is here.
ELSEWHERE = {
    "dispatch_kernel": "SequenceDispatcher.dispatch, which owns buffers and barriers",
    "test_comm_metadata": "the generators and test_qkv_dispatch of this module",
    "inplace_metadata": "the functions of this module: import them from here",
    "EPConfig": f"waybill.moe and {_EXPERTS}",
    "EPAllToAllLayoutDesc": f"waybill.moe and {_EXPERTS}",
    "DispatchCombineContext": _EXPERTS,
    "BarrierAllContext": _EXPERTS,
    "ExpertParallel": _EXPERTS,
    "EPLowLatencyAllToAllLayer": "waybill.torch.compat",
    "DispatchMetaInfo": "waybill.torch.compat",
    "initialize_distributed": "waybill.torch",
    "get_ag_splits_and_recv_offset_for_dispatch": _KERNEL,
    "get_dispatch_send_reqs": _KERNEL,
    "ep_dispatch_token_inplace": _KERNEL,
    "ep_combine_token_inplace": _KERNEL,
    "kernel_dispatch_token_intra_node": _KERNEL,
    "kernel_combine_token_intra_node": _KERNEL,
    "dispatch_kernel_v2": _KERNEL,
    "combine_kernel_v2": _KERNEL,
    "Buffer": _DEEP_EP,
    "ElasticBuffer": _DEEP_EP,
    "Config": _DEEP_EP,
    "EventOverlap": _DEEP_EP,
    "MoEAlltoAllTokenDispatcher": "waybill.integrations.megatron, as WaybillTokenDispatcher",
    "MoEFlexTokenDispatcher": f"{_DEEP_EP}, whose install() serves it",
    "ContextParallelAttention": "waybill.torch",
    "nvshmem_barrier_all_on_stream": "EPAll2AllLayer.ep_barrier_all(stream)",
    "barrier_all_on_stream": "EPAll2AllLayer.ep_barrier_all(stream, intra_node_only=True)",
    "finalize_distributed": "torch.distributed.destroy_process_group()",
    "dist_print": "not needed: print on the ranks that you choose",
    "magi_attn_flex_key": "ContextParallelAttention.plan(pieces)",
    "magi_attn_varlen_key": "ContextParallelAttention.plan(pieces)",
    "calc_attn": _ATTENTION,
    "undispatch": _HOME,
    "ring_flash_attn_varlen_func": _ATTENTION,
    "zigzag_ring_flash_attn_varlen_func": _ATTENTION,
    "llama3_flash_attn_varlen_func": _ATTENTION,
}


def say_where(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module."""

    def missing(name: str) -> NoReturn:
        raise AttributeError(_text(module, name))

    return missing


def _text(module: str, name: str) -> str:
    text = f"module {module!r} has no attribute {name!r}"
    place = ELSEWHERE.get(name)
    if place is None or place == module:
        return text
    return f"{text}: it is in {place}" if place.startswith("waybill") else f"{text}: it is {place}"


class _Finder(MetaPathFinder, Loader):
    """An import of an old name gives the module that has its names now; that of another library's
    name says where it is.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object | None = None
    ) -> ModuleSpec | None:
        module, _, name = fullname.rpartition(".")
        if name in ELSEWHERE and module in _ASKED:
            raise ImportError(_text(module, name), name=fullname)
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = ModuleType(spec.name)
        vars(made).update(vars(importlib.import_module(MOVED[spec.name])))
        return made

    def exec_module(self, module: ModuleType) -> None:
        """All is there."""


def install() -> None:
    """The finder comes last: modules that exist are found before."""
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
