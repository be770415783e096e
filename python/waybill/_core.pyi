# The compiled part is private: its functions take and give plain arrays and tuples, to which the
# package gives types.
from typing import Any

version: str
cuda_version: str | None
has_cuda: bool

class Plan:
    def __getattr__(self, name: str) -> Any: ...

class AttentionPlan:
    def __getattr__(self, name: str) -> Any: ...

class SparseMetadata:
    def __getattr__(self, name: str) -> Any: ...

class Routing:
    def __getattr__(self, name: str) -> Any: ...

class World:
    def __getattr__(self, name: str) -> Any: ...

def __getattr__(name: str) -> Any: ...
