"""Experts: tokens of all ranks to their experts and back, for numpy arrays: in one process
(``simulate_dispatch``), and between ranks in host memory (``EPAll2AllLayer``).

Rows are ordered by local expert, then source rank, then token, then topk slot: always. What
``simulate_dispatch`` delivers is what a layer must deliver on any world, bit for bit.
"""

import typing as _typing

from .. import compat as _compat
from . import even_experts as _even_experts
from . import payloads as _payloads
from . import predict as _predict
from . import simulate as _simulate
from .config import EPConfig
from .even_experts import *  # noqa: F403
from .layer import EPAll2AllLayer
from .payloads import *  # noqa: F403
from .predict import *  # noqa: F403
from .simulate import *  # noqa: F403

__all__ = ["EPAll2AllLayer", "EPConfig"]
__all__ += _even_experts.__all__
__all__ += _payloads.__all__
__all__ += _predict.__all__
__all__ += _simulate.__all__

if not _typing.TYPE_CHECKING:
    __getattr__ = _compat.say_where(__name__)
