"""Names of version 0.1 that have moved: pickles, and programs that import them, find them still."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

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


class _Finder(MetaPathFinder, Loader):
    """An import of an old name gives the module that has its names now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object | None = None
    ) -> ModuleSpec | None:
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
