"""NeMo Automodel's ContextParallelSharder, got from the model as its recipes do, and a Llama of
transformers, beside one process.
"""

import pytest
import ranks
import torch
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from transformers import LlamaConfig, LlamaForCausalLM

from waybill import InvalidArgument, Unsupported
from waybill.integrations import automodel
from waybill.integrations.transformers import SharedAttention

VOCABULARY, WORLD = 40, 4


def build(implementation):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    return model


def batch_of(entries):
    """Documents of these lengths, by entry of the batch; labels are of the next token."""
    draws = torch.Generator().manual_seed(7)
    tokens, labels, positions = [], [], []
    for lengths in entries:
        documents = [torch.randint(VOCABULARY, (n,), generator=draws) for n in lengths]
        tokens.append(torch.cat(documents))
        labels.append(torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in documents]))
        positions.append(torch.cat([torch.arange(n) for n in lengths]))
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: torch.stack(rows).to(ranks.DEVICE) for name, rows in batch.items()}


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def alone(entries):
    model, batch = build("eager").to(ranks.DEVICE), batch_of(entries)
    rows = []
    for entry, lengths in enumerate(entries):
        parts = batch["input_ids"][entry].split(lengths)
        rows.append(torch.cat([model(part[None], use_cache=False).logits[0] for part in parts]))
    logits = torch.stack(rows)
    loss_of(logits, batch["labels"]).backward()
    return logits.detach(), [weight.grad for weight in model.parameters()]


# One entry that is padded to 4 ranks, and two that need not be.
@pytest.mark.parametrize("entries", [[[37, 5, 1, 20, 10]], [[9, 15, 6], [30]]])
def test_as_one_process(entries):
    def body(rank):
        want, want_gradients = alone(entries)
        mesh = torch.distributed.init_device_mesh(ranks.DEVICE, (WORLD,), mesh_dim_names=("cp",))
        model = build("waybill").to(ranks.DEVICE)
        attention = SharedAttention(mesh["cp"], model.config, block_tokens=4, in_place=True)
        automodel.install(model, attention)
        batch = batch_of(entries)
        sharder = ContextParallelSharder(model, mesh, batch)
        _, mine = sharder.shard(batch)
        labels = mine.pop("labels")
        logits = model(**mine, use_cache=False).logits
        whole = sharder.gather_token_tensor(logits.detach(), trim=True)
        torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-5)
        again = sharder.shard_token_tensor(batch_of(entries)["labels"], fill=-100)
        assert torch.equal(again.flatten(), labels.flatten())
        loss_of(logits, labels).backward()
        for weight, expected in zip(model.parameters(), want_gradients):
            torch.distributed.all_reduce(weight.grad)
            torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-4)
        attention.close()

    ranks.run(WORLD, body)


def test_what_is_refused():
    def body(rank):
        mesh = torch.distributed.init_device_mesh(ranks.DEVICE, (2,), mesh_dim_names=("cp",))
        attention = SharedAttention(mesh["cp"], build("waybill").config)

        def shard(**batch):
            return automodel.sharder_of(attention, mesh).shard(batch)[1]

        tokens = torch.zeros(1, 4, dtype=torch.int64)
        with pytest.raises(InvalidArgument, match=f"rank {rank}: input_ids is None"):
            shard()
        with pytest.raises(InvalidArgument, match=f"rank {rank}: input_ids have 3 x 3 tokens"):
            shard(input_ids=torch.zeros(3, 3, dtype=torch.int64))
        with pytest.raises(InvalidArgument, match=rf"rank {rank}: position_ids has shape \[1, 3\]"):
            shard(input_ids=tokens, position_ids=tokens[:, :3])
        for name, value, words in (
            ("input_ids", [[1, 2]], "is a list"),
            ("input_ids", tokens[:, :0], r"of shape \[1, 0\]"),
            ("position_ids", [0, 1], "= a list"), ("position_ids", tokens.float(), "integers"),
            ("attention_mask", tokens[:, :2], r"has shape \[1, 2\]"),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=f"rank {rank}: {name}.*{words}"):
                shard(**{"input_ids": tokens, name: value})
        with pytest.raises(InvalidArgument, match=f"rank {rank}: loss_mask has shape"):
            automodel._shard(attention, {"input_ids": tokens}, tokens[:, :1], 0)
        with pytest.raises(Unsupported, match=f"rank {rank}: attention_mask hides more"):
            shard(input_ids=tokens, attention_mask=torch.tensor([[0, 1, 1, 1]]))
        numbers = torch.tensor([[1, 1, 2, 0]])  # of packed documents
        with pytest.raises(InvalidArgument, match=f"rank {rank}: attention_mask numbers documents"):
            shard(input_ids=tokens, attention_mask=numbers)
        positions = torch.tensor([[0, 1, 0, 1]])
        shard(input_ids=tokens, attention_mask=numbers, position_ids=positions)
        with pytest.raises(InvalidArgument, match=f"rank {rank}: seq_lens without position_ids"):
            shard(input_ids=tokens, seq_lens=torch.tensor([[2, 2]]))
        mine = shard(input_ids=tokens, attention_mask=torch.tensor([[1, 1, 1, 0]]))
        assert mine["position_ids"].tolist() == [[2 * rank, 2 * rank + 1]]
        assert "attention_mask" not in mine

    ranks.run(2, body)
