"""torchtitan's Llama 3 over packed documents on several ranks, with Waybill's attention by its own
override, beside one process with plain attention, a document at a time.
"""

import pytest
import ranks
import torch
from torch.utils.checkpoint import checkpoint
from torchtitan.config import OverrideConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common.attention import VarlenAttention, create_varlen_metadata_for_document
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE

from waybill import AttentionCosts, InvalidArgument, Unsupported
from waybill.integrations.torchtitan import WaybillAttention, share_documents
from waybill.torch import pack

OURS = "waybill.integrations.torchtitan.waybill_attention"
WORLD, DIM, VOCABULARY = 4, 32, 40
LENGTHS = [21, 3, 1, 40, 9, 14]
BEFORE = 6  # keys before the query, of layers with a window


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Short documents are cut, and move."""
    options = {"block_tokens": 4, "in_place": True}
    monkeypatch.setattr(WaybillAttention, "options", options)


class Plain(torch.nn.Module):
    """Of one document, with a dense mask."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def forward(self, q, k, v, *, attention_masks, scale=None, **_):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        rows = torch.arange(q.shape[2])
        distance = rows[:, None] - rows
        mask = (distance >= 0) & (distance <= (self.before or len(rows)))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        ).transpose(1, 2)


def config_of(before, imports):
    """A small one, with grouped heads."""
    norm = RMSNorm.Config(normalized_shape=DIM)
    layers = llama3._build_llama3_layers(
        n_layers=2, dim=DIM, n_heads=4, n_kv_heads=2, hidden_dim=48, attn_backend="varlen",
        rope=ComplexRoPE.Config(dim=DIM // 4, max_seq_len=64, theta=500.0),
    )  # fmt: skip
    config = llama3.Llama3Model.Config(
        dim=DIM, vocab_size=VOCABULARY, norm=norm, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY),
    )  # fmt: skip
    if before is not None:
        for layer in config.layers:
            layer.attention.inner_attention.window_size = (before, 0)
    apply_overrides(OverrideConfig(imports=imports), config)
    return config


def model_of(before, imports=()):
    set_spmd_backend("default")
    model = config_of(before, list(imports)).build()
    model.init_states(buffer_device=torch.device("cpu"))
    draws = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=draws)
    return model


def documents():
    draws = torch.Generator().manual_seed(6)
    return [torch.randint(VOCABULARY, (n,), generator=draws) for n in LENGTHS]


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def alone(before):
    model = model_of(before)
    for block in model.layers.values():
        block.attention.inner_attention = Plain(before)
    logits = []
    for document in documents():
        out = model(document[None], torch.arange(len(document))[None])[0]
        loss_of(out[:-1], document[1:]).backward()
        logits.append(out.detach())
    return torch.cat(logits), [weight.grad for weight in model.parameters()]


def shared(rank, before, cuts, checkpoints):
    model = model_of(before, [OURS])
    kinds = {type(block.attention.inner_attention) for block in model.layers.values()}
    assert kinds == {WaybillAttention}
    whole = pack(documents(), first_document=0)
    mine = whole.cut(cuts[rank], cuts[rank + 1])
    if cuts == WHOLE:  # as its trainer does
        positions = mine.positions[None]
        masks = model.get_attention_masks(positions=positions)
    else:
        masks = share_documents(mine.pieces, device="cpu")
        positions = masks.positions()
        assert torch.equal(positions[0], mine.positions)
    call = model
    if checkpoints:

        def call(*given):
            return checkpoint(model, *given, use_reentrant=False)

    logits = call(mine.tokens[None], positions, masks)[0]
    loss_of(logits, mine.labels).backward()
    for weight in model.parameters():
        torch.distributed.all_reduce(weight.grad)
    return logits.detach().numpy(), [weight.grad.numpy() for weight in model.parameters()]


WHOLE, ANYWHERE = [0, 21, 25, 65, 88], [0, 10, 11, 50, 88]


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="its attention is bfloat16 there")
@pytest.mark.parametrize(
    ("before", "cuts", "checkpoints"),
    [
        (None, WHOLE, False),
        (BEFORE, WHOLE, True),
        (None, ANYWHERE, True),
        (BEFORE, ANYWHERE, False),
    ],
)
def test_as_one_process(before, cuts, checkpoints):
    want, want_gradients = alone(before)
    found = ranks.run(WORLD, lambda rank: shared(rank, before, cuts, checkpoints))
    got = torch.cat([torch.from_numpy(logits) for logits, _ in found])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for _, gradients in found:
        for gradient, expected in zip(map(torch.from_numpy, gradients), want_gradients):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_settings_come_with_the_override():
    config = config_of(None, [(OURS, {"kernel": "dot_product"})])
    for layer in config.layers:
        inner = layer.attention.inner_attention
        assert isinstance(inner, WaybillAttention.Config) and inner.kernel == "dot_product"


def test_what_is_refused():
    def body(rank):
        attention = WaybillAttention.Config().build()
        rows = torch.zeros(1, 5, 2, 8, requires_grad=True)
        with pytest.raises(InvalidArgument, match=f"attention_masks on rank {rank} is a NoneType"):
            attention(rows, rows, rows, attention_masks=None)
        masks = create_varlen_metadata_for_document(torch.tensor([[0, 1, 2, 0, 1]]))
        with pytest.raises(InvalidArgument, match=f"on rank {rank} are of 5 rows, expected 10"):
            wide = torch.zeros(2, 5, 2, 8)
            attention(wide, wide, wide, attention_masks=masks)
        with pytest.raises(Unsupported, match=f"out_transform on rank {rank}"):
            attention(rows, rows, rows, attention_masks=masks, out_transform=lambda out, lse: out)
        with torch.no_grad():
            lse = attention(
                rows, rows, rows, attention_masks=masks, out_transform=lambda out, lse: lse
            )
        assert lse.shape == (1, 5, 2)
        with pytest.raises(Unsupported, match=r"window_size = \(3, 1\)"):
            WaybillAttention.Config(window_size=(3, 1)).build()
        full = WaybillAttention.Config(window_size=(-1, -1)).build()
        v = torch.arange(5.0).view(1, 5, 1, 1).expand(1, 5, 2, 8)
        out = full(rows, rows, v, attention_masks=masks)
        assert out[0, :, 0, 0].tolist() == [1, 1, 1, 3.5, 3.5]

    ranks.run(2, body)


def test_documents_across_ranks_want_positions():
    """Rotary embeddings would count rows."""

    def body(rank):
        attention = WaybillAttention.Config().build()
        rows = torch.zeros(1, 5, 2, 8)
        masks = share_documents([(0, 5 * rank, 5)], device="cpu")
        with pytest.raises(InvalidArgument, match=rf"rank {rank} .*positions=masks\.positions\(\)"):
            attention(rows, rows, rows, attention_masks=masks)
        assert masks.positions()[0, 0] == 5 * rank
        assert attention(rows, rows, rows, attention_masks=masks).shape == rows.shape

    ranks.run(2, body)


def test_one_rank_has_other_rows_or_options():
    """All hear of it; calibrated costs are an option like others."""

    def body(rank):
        rows = torch.zeros(1, 5 + rank, 2, 8)
        masks = create_varlen_metadata_for_document(torch.tensor([[0, 1, 2, 0, 1]]))
        with pytest.raises(InvalidArgument, match="on rank 1 are of 5 rows, expected 6"):
            WaybillAttention.Config().build()(rows, rows, rows, attention_masks=masks)
        rows = rows[:, :5]
        costs = AttentionCosts(1e12, row_pairs=300, about={"device": "H200"})
        for options, words in (
            ({"costs": costs}, None), ({"block_tokens": 4 + rank}, "rank 1 with block_tokens = 5"),
            ({"window": 3}, f"options hold 'window' on rank {rank}"),
            ({"block": 3}, f"options hold 'block' on rank {rank}"),
        ):  # fmt: skip
            WaybillAttention.options = options
            attention = WaybillAttention.Config().build()
            masks = create_varlen_metadata_for_document(torch.tensor([[0, 1, 2, 0, 1]]))
            if words is None:
                assert attention(rows, rows, rows, attention_masks=masks).shape == rows.shape
                continue
            with pytest.raises(InvalidArgument, match=words):
                attention(rows, rows, rows, attention_masks=masks)
        with pytest.raises(InvalidArgument, match=r"share_documents: .*pieces of rank 1"):
            share_documents([5] if rank == 0 else [0], device=ranks.DEVICE)
        with pytest.raises(InvalidArgument, match="share_documents: ranks is"):
            share_documents([5], ranks=3)

    ranks.run(2, body)


def test_its_own_context_parallelism_refuses():
    """Why the ranks are its data-parallel ones; when this fails there may be a better way."""
    from torchtitan.distributed.context_parallel import apply_cp_to_forward

    with pytest.raises(NotImplementedError, match="Variable-length attention"):
        apply_cp_to_forward([VarlenAttention.Config().build()], None)
