"""Attention of packed documents that is spread over ranks: ``ContextParallelAttention``."""
