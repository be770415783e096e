"""What converts to Megatron's own types, with a stand-in where Megatron Core is not installed."""

import dataclasses
import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest

import waybill


@pytest.fixture
def theirs(monkeypatch):
    """Megatron's class: the fields that it has had since Core 0.6."""

    @dataclasses.dataclass
    class PackedSeqParams:
        qkv_format: Any = None
        cu_seqlens_q: Any = None
        cu_seqlens_kv: Any = None
        cu_seqlens_q_padded: Any = None
        cu_seqlens_kv_padded: Any = None
        max_seqlen_q: Any = None
        max_seqlen_kv: Any = None

    names = ("megatron", "megatron.core", "megatron.core.packed_seq_params")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].PackedSeqParams = PackedSeqParams
    return PackedSeqParams


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_packed_params(face, theirs, dtype):
    torch = pytest.importorskip("torch")
    ours = face.module.mlp_layout_packed_params(face.array(np.array([5, 2, 9], dtype)))
    made = ours.to_megatron()
    assert type(made) is theirs and made.qkv_format == "thd"
    for lengths in (made.cu_seqlens_q, made.cu_seqlens_kv):
        assert lengths.dtype == torch.int32 and lengths.tolist() == [0, 5, 7, 16]
    assert made.max_seqlen_q == made.max_seqlen_kv == 9
    assert type(made.max_seqlen_q) is type(made.max_seqlen_kv) is int
    assert made.cu_seqlens_q_padded is made.cu_seqlens_kv_padded is None
    assert ours.to_megatron("meta").cu_seqlens_q.device.type == "meta"


def test_more_rows_than_megatron_counts(face, theirs):
    pytest.importorskip("torch")
    ours = face.module.mlp_layout_packed_params(face.array(np.array([2**31])))
    with pytest.raises(waybill.InvalidArgument, match=r"2147483648 rows, .*int32"):
        ours.to_megatron()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="Megatron is there")
def test_without_megatron(face):
    with pytest.raises(waybill.Unsupported, match=r"PackedSeqParams\.to_megatron: .*megatron-core"):
        face.module.mlp_layout_packed_params(face.array(np.array([5]))).to_megatron()
