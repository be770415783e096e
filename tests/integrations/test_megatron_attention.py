"""Self attention of Megatron-Core (projections, RoPE, core attention) over packed documents that
lie on several ranks, beside its own core attention on one.
"""

import contextlib
import os
from types import SimpleNamespace

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # each rank would compile small functions

import pytest
import ranks
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from waybill import InvalidArgument, Unsupported
from waybill.integrations.megatron import SharedSeqParams, WaybillCoreAttention, share_sequences
from waybill.torch import pack

HIDDEN, HEADS = 32, 4
WORLD = int(os.environ.get("WORLD_SIZE", 4))  # 2 or 4, under torchrun
LENGTHS = [16, 8, 40, 24]  # multiples of 2 * WORLD, as zigzag wants
WINDOWED = {"window_size": (5, 0)}


@pytest.fixture(autouse=True)
def current_device(monkeypatch):
    if ranks.DEVICE == "cpu":  # its rotary embeddings ask for torch's current device
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # States of GPUs' random numbers, of which none are drawn here: there is no dropout.
    states = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: states)
    for name in ("_get_all_rng_states", "_set_all_rng_states"):
        monkeypatch.setattr(tensor_parallel.random, name, lambda *_: ())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Short documents are cut, and move; any dtype."""
    options = {"block_tokens": 4, "in_place": True, "kernel": "dot_product"}
    monkeypatch.setattr(WaybillCoreAttention, "options", options)


def config_of(cp_size, **options):
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=2,
        use_cpu_initialization=True, add_bias_linear=False, attention_dropout=0.0,
        hidden_dropout=0.0, context_parallel_size=cp_size, bf16=False, params_dtype=torch.float32,
        masked_softmax_fusion=False, apply_rope_fusion=False, **options,
    )  # fmt: skip


def layer_of(core, cp_size, groups, **options):
    """The same weights on all ranks."""
    spec = get_gpt_layer_local_spec().submodules.self_attention.submodules
    spec.core_attention = core
    layer = SelfAttention(
        config_of(cp_size, **options), spec, layer_number=1, attn_mask_type=AttnMaskType.causal,
        pg_collection=groups,
    )  # fmt: skip
    draws = torch.Generator().manual_seed(4)
    for weight in layer.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draws) / 6)
    return layer.to(ranks.DEVICE)


def groups_of(cp_size):
    """Process groups of a layer: of one rank each, or context parallel over all."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    alone = [torch.distributed.new_group([r]) for r in range(world)][rank]
    cp = torch.distributed.group.WORLD if cp_size > 1 else alone
    return ProcessGroupCollection(tp=alone, cp=cp), alone


def embeddings(alone):
    of_positions = RotaryEmbedding(
        HIDDEN // HEADS, 1.0, use_cpu_initialization=ranks.DEVICE == "cpu", cp_group=alone
    )
    return of_positions(max(LENGTHS), packed_seq=True)


def hidden_of():
    draws = torch.Generator().manual_seed(9)
    return [torch.randn(n, 1, HIDDEN, generator=draws).to(ranks.DEVICE) for n in LENGTHS]


def want_of(alone, before=None):
    """(outputs of all rows, gradients): a document at a time by Megatron-Core's own, of which the
    mask is said here (its own of windows asks for GPUs).
    """
    layer = layer_of(DotProductAttention, 1, ProcessGroupCollection(tp=alone, cp=alone))
    outputs = []
    for hidden in hidden_of():
        rows = torch.arange(len(hidden), device=ranks.DEVICE)
        distance = rows[:, None] - rows
        hidden_keys = (distance < 0) | (distance > (before or len(hidden)))
        rotary = embeddings(alone)[: len(hidden)]
        out, _ = layer(hidden, hidden_keys[None, None], rotary_pos_emb=rotary)
        out.square().sum().backward()
        outputs.append(out.detach()[:, 0])
    return torch.cat(outputs), [weight.grad for weight in layer.parameters()]


def compare(layer, rows, params, rotary, want, want_gradients):
    hidden = torch.cat(hidden_of())[rows]
    out, _ = layer(hidden, None, rotary_pos_emb=rotary, packed_seq_params=params)
    torch.testing.assert_close(out[:, 0], want[rows], rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    for weight, expected in zip(layer.parameters(), want_gradients):
        torch.distributed.all_reduce(weight.grad)
        torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, WINDOWED, {"recompute_granularity": "selective"}])
def test_its_context_parallelism(options):
    """Zigzag chunks, PackedSeqParams as Megatron-Core's own."""

    def body(rank):
        groups, alone = groups_of(WORLD)
        want = want_of(alone, options.get("window_size", (None,))[0])
        rows, first = [], 0
        for length in LENGTHS:
            chunks = torch.arange(first, first + length).chunk(2 * WORLD)
            rows += [chunks[rank], chunks[2 * WORLD - 1 - rank]]
            first += length
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(ranks.DEVICE, torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
            max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS),
        )  # fmt: skip
        layer = layer_of(WaybillCoreAttention, WORLD, groups, **options)
        compare(layer, torch.cat(rows), params, embeddings(alone), *want)

    parallel(WORLD, body)


def parallel(world_size, body):
    """A checkpoint of Megatron-Core asks for its random state and its parallel state."""

    def inner(rank):
        parallel_state.initialize_model_parallel()
        body(rank)
        parallel_state.destroy_model_parallel()

    ranks.run(world_size, inner)


@pytest.mark.parametrize("rotary", ["by sequence", "by row"])
def test_shared_sequences(rotary):
    """Without its context parallelism: whole documents, or pieces that begin anywhere."""

    def body(rank):
        groups, alone = groups_of(1)
        whole = pack([torch.arange(n) for n in LENGTHS], first_document=0)
        cuts = [0, 16, 24, 64, 88] if rotary == "by sequence" else [0, 5, 31, 70, 88]
        cuts = cuts[:WORLD] + cuts[-1:]
        begin, end = cuts[rank], cuts[rank + 1]
        mine = whole.cut(begin, end)
        if rotary == "by row":  # rank 0 hears of it
            one = rank or "[123]"
            with pytest.raises(InvalidArgument, match=rf"held\[0\] on rank {one} begins at"):
                share_sequences(None, mine.pieces, ranks.DEVICE)
        params = share_sequences(None, mine.pieces, ranks.DEVICE, rotary=rotary)
        of_rows = embeddings(alone)
        if rotary == "by row":
            of_rows = of_rows[mine.positions.to(ranks.DEVICE)]
        layer = layer_of(WaybillCoreAttention, 1, groups)
        compare(layer, slice(begin, end), params, of_rows, *want_of(alone))

    parallel(WORLD, body)


def gpt_of(core):
    """A whole model, of groups of one rank each; the same weights on all ranks."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core
    model = GPTModel(
        config_of(1), spec, vocab_size=32, max_sequence_length=64, position_embedding_type="rope"
    )
    draws = torch.Generator().manual_seed(4)
    for weight in model.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draws) / 6)
    return model


def documents_of(rank, microbatch):
    """Unequally many, of unequal lengths."""
    draws = torch.Generator().manual_seed(10 * rank + microbatch)
    lengths = [[23, 4], [3, 9, 2], [17], [1, 5]][2 * microbatch + rank]
    return [torch.randint(32, (n,), generator=draws) for n in lengths]


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="rows in host memory")
def test_a_whole_model_with_accumulated_microbatches():
    """Its own positions and losses of tokens; the sum over labels, divided by all ranks' labels."""

    def body(rank):
        model, gradients = gpt_of(WaybillCoreAttention), []
        parts = [pack(documents_of(rank, i)) for i in range(2)]
        count = torch.tensor(sum(int((part.labels >= 0).sum()) for part in parts))
        torch.distributed.all_reduce(count)
        for part in parts:
            params = share_sequences(None, part.pieces, ranks.DEVICE)
            losses = model(
                part.tokens[None], part.positions[None], None, packed_seq_params=params,
                labels=part.labels.clamp(min=0)[None], loss_mask=part.labels[None] >= 0,
            )  # fmt: skip
            (losses.flatten()[part.labels >= 0].sum() / count).backward()
        for weight in model.parameters():
            torch.distributed.all_reduce(weight.grad)
            gradients.append(weight.grad)
        model = gpt_of(DotProductAttention)
        for document in (d for i in range(2) for r in range(2) for d in documents_of(r, i)):
            rows = torch.arange(len(document))
            hidden_keys = (rows[:, None] < rows)[None, None]
            logits = model(document[None], rows[None], hidden_keys)[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
            (loss / count).backward()
        for got, weight in zip(gradients, model.parameters()):
            torch.testing.assert_close(got, weight.grad, rtol=1e-3, atol=1e-5)

    parallel(2, body)


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="rows in host memory")
def test_models_that_rotate_pieces_from_zero():
    """A GPTModel makes its embeddings of the longest sequence: wrong for pieces."""

    def body(rank):
        tokens = torch.zeros(1, 5, dtype=torch.int64)
        params = share_sequences(None, [(0, 5 * rank, 5)], ranks.DEVICE, rotary="by row")
        with pytest.raises(InvalidArgument, match=r'rotary = "by row" in a model that makes its'):
            gpt_of(WaybillCoreAttention)(
                tokens, 5 * rank + torch.arange(5)[None], None, packed_seq_params=params
            )

    parallel(2, body)


def core_of(groups, **options):
    return WaybillCoreAttention(
        config_of(1, **options), 1, AttnMaskType.causal, "self", pg_collection=groups
    )


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="rows in host memory")
def test_what_is_refused():
    def body(rank):
        groups, _ = groups_of(2)
        core = core_of(groups)
        rows = torch.zeros(5, 2, 8)
        with pytest.raises(Unsupported, match="qkv_format None, expected 'thd'"):
            core(rows, rows, rows, None)
        ends = torch.tensor([0, 4, 10], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        match = rf"sequence 1 of cu_seqlens on rank {rank} has 6 tokens, expected a multiple of 4"
        with pytest.raises(InvalidArgument, match=match):
            core(rows, rows, rows, None, packed_seq_params=params)
        params.cu_seqlens_kv = ends + 1
        with pytest.raises(Unsupported, match=f"cu_seqlens_kv on rank {rank} differ"):
            core(rows, rows, rows, None, packed_seq_params=params)
        with pytest.raises(Unsupported, match="got an attention_bias"):
            core(rows, rows, rows, None, packed_seq_params=params, attention_bias=rows)
        padded = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_kv=torch.tensor([0, 5]),
            cu_seqlens_q_padded=torch.tensor([0, 8]), cu_seqlens_kv_padded=torch.tensor([0, 8]),
        )  # fmt: skip
        with pytest.raises(Unsupported, match=f"cu_seqlens_q_padded on rank {rank} differ"):
            core(
                rows[:4], rows[:4], rows[:4], None, packed_seq_params=padded,
                attn_mask_type=AttnMaskType.padding,
            )  # fmt: skip
        core(rows[:4], rows[:4], rows[:4], None, packed_seq_params=padded)
        params = share_sequences(None, [5], ranks.DEVICE)
        with pytest.raises(Unsupported, match=rf"context_parallel_size = 2 on rank {rank}"):
            core(rows, rows, rows, None, packed_seq_params=params)
        with pytest.raises(InvalidArgument, match="SharedSeqParams without pieces"):
            core(rows, rows, rows, None, packed_seq_params=SharedSeqParams(qkv_format="thd"))
        with pytest.raises(InvalidArgument, match=f'rotary on rank {rank} = "never"'):
            share_sequences(None, [5], ranks.DEVICE, rotary="never")
        for held in ("x", None, [1.5], ["x"], [(0, 0, 0)]):  # of one rank: both hear of it
            with pytest.raises(InvalidArgument, match=r"share_sequences: .*pieces of rank 1"):
                share_sequences(None, [5] if rank == 0 else held, ranks.DEVICE)
        for given in (3, "x", [0, 1]):
            with pytest.raises(InvalidArgument, match="share_sequences: ranks is"):
                share_sequences(given, [5], ranks.DEVICE)
        with pytest.raises(InvalidArgument, match="share_sequences: device = 'x'"):
            share_sequences(None, [5], "x")
        for options in ({"blok_tokens": 4}, {"window": 3}, {"costs": {}, "in_place": []}):
            WaybillCoreAttention.options = {"kernel": "dot_product", **options}
            with pytest.raises(
                InvalidArgument, match=f"WaybillCoreAttention: options .*rank {rank}"
            ):
                shared = share_sequences(None, [5], ranks.DEVICE)
                core_of(groups_of(1)[0])(rows, rows, rows, None, packed_seq_params=shared)
        with pytest.raises(Unsupported, match=r"window_size = \(5, 2\)"):
            core_of(groups, window_size=(5, 2))
        with pytest.raises(Unsupported, match=r"softmax_type = 'off-by-one'"):
            core_of(groups, softmax_type="off-by-one")

    ranks.run(2, body)
