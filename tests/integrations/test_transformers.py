"""Models of transformers over ranks, beside the same model in one process."""

import pytest
import ranks
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from waybill import InvalidArgument, Unsupported
from waybill.integrations.transformers import Chunk, SharedAttention, windows_of
from waybill.torch import pack, run_threads

VOCABULARY, WORLD = 40, 4
LENGTHS = [37, 5, 1, 20, 9, 28]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral():
    """A window that is shorter than documents."""
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=7))


def llama4():
    """Layers of chunks and of whole documents; both have experts."""
    kinds = ["chunked_attention", "full_attention"]
    config = Llama4TextConfig(
        **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8,
        layer_types=kinds, attn_temperature_tuning=False, pad_token_id=None,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


def gemma3():
    """A layer with a window, and one without."""
    config = Gemma3TextConfig(
        **SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))


def build(kind, implementation):
    torch.manual_seed(3)
    model = kind()
    model.set_attn_implementation(implementation)
    return model


def documents():
    draws = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (n,), generator=draws) for n in LENGTHS]


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def alone(kind):
    """Logits of all documents, each on its own, by eager attention; gradients of the sum."""
    model = build(kind, "eager")
    logits = []
    for document in documents():
        out = model(document[None], use_cache=False).logits[0]
        loss_of(out[:-1], document[1:]).backward()
        logits.append(out.detach())
    return torch.cat(logits), [p.grad for p in model.parameters()]


def shared(rank, kind, checkpoints):
    """The batch in pieces that begin and end anywhere: this rank's logits, summed gradients."""
    model = build(kind, "waybill").to(ranks.DEVICE)
    if checkpoints:
        model.train()
        model.gradient_checkpointing_enable()
    attention = SharedAttention(None, model.config, block_tokens=4, in_place=True)
    whole = pack(documents(), first_document=0)
    cuts = [0, 11, 40, 41, len(whole.tokens)]
    mine = whole.cut(cuts[rank], cuts[rank + 1]).to(ranks.DEVICE)
    batch = attention.plan(attention.gather(mine.pieces))
    assert torch.equal(batch.position_ids()[0], mine.positions)
    logits = model(
        mine.tokens[None], position_ids=batch.position_ids(), waybill=batch, use_cache=False
    ).logits[0]
    loss_of(logits, mine.labels).backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    attention.close()
    return logits.detach().cpu().numpy(), [p.grad.cpu().numpy() for p in model.parameters()]


@pytest.mark.parametrize("kind", [llama, mistral, llama4, gemma3])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_as_one_process(kind, checkpoints):
    want, want_gradients = alone(kind)
    found = ranks.run(WORLD, lambda rank: shared(rank, kind, checkpoints))
    got = torch.cat([torch.from_numpy(logits) for logits, _ in found])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for _, gradients in found:
        for gradient, expected in zip(map(torch.from_numpy, gradients), want_gradients):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_windows():
    config = MistralConfig(**SIZES, head_dim=8, sliding_window=7)
    assert windows_of(config) == [7]
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    assert windows_of(config) == [None, 7]
    config.layer_types = ["chunked_attention", "full_attention"]
    config.attention_chunk_size = 8192
    assert windows_of(config) == [Chunk(8192), None]
    with pytest.raises(Unsupported, match="attn_temperature_tuning = True"):
        SharedAttention(None, Llama4TextConfig(**SIZES, pad_token_id=None))
    config.layer_types = ["linear_attention"]
    with pytest.raises(Unsupported, match=r"layer_types\[0\] = 'linear_attention'"):
        windows_of(config)


@pytest.fixture(scope="module")
def call():
    """model(...) on one rank, of a batch of 5 rows."""

    def one(error, match, **changed):
        def body(world):
            model = build(llama, "waybill")
            attention = SharedAttention(world, model.config, **changed.pop("options", {}))
            batch = attention.plan([[3, 2]])
            given = {"waybill": batch, "position_ids": batch.position_ids(), "use_cache": False}
            tokens = changed.pop("tokens", torch.zeros(1, 5, dtype=torch.int64))
            with pytest.raises(error, match=match):
                model(tokens, **{**given, **changed})

        run_threads(1, body)

    return one


def test_what_is_refused(call):
    call(InvalidArgument, "waybill is a NoneType", waybill=None)
    call(Unsupported, "attention_mask hides tokens", attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))
    call(Unsupported, "rank 0: got an attention_mask", attention_mask=torch.zeros(1, 1, 5, 5))
    call(Unsupported, "rank 0: is_causal = False", is_causal=False)
    call(Unsupported, "rank 0: softcap is float", softcap=30.0)
    call(InvalidArgument, "rank 0: scaling = ", options={"scale": 1.0})
    call(InvalidArgument, "rank 0", tokens=torch.zeros(1, 4, dtype=torch.int64), position_ids=None)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    call(InvalidArgument, r"rank 0: query \(2, 4, 5, 8\)", tokens=tokens, position_ids=None)
    call(InvalidArgument, r"rank 0: sliding_window = 9", sliding_window=9)


def test_the_models_own_loss():
    """With labels that are in their rows already, and the number of all ranks' labels."""

    def body(rank):
        model = build(llama, "waybill")
        attention = SharedAttention(None, model.config, block_tokens=4, in_place=True)
        whole = pack(documents(), first_document=0)
        mine = whole.cut(41 * rank, 41 + 59 * rank)
        batch = attention.plan(attention.gather(mine.pieces))
        labels, count = mine.labels[None], (whole.labels >= 0).sum()
        loss = model(
            mine.tokens[None], position_ids=batch.position_ids(), waybill=batch, use_cache=False,
            labels=labels, shift_labels=labels, num_items_in_batch=count,
        ).loss  # fmt: skip
        loss.backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
        torch.distributed.all_reduce(loss.detach())
        return float(loss), [p.grad.numpy() for p in model.parameters()]

    logits, gradients = alone(llama)
    labels = pack(documents()).labels
    count = (labels >= 0).sum()
    for loss, found in ranks.run(2, body):
        assert abs(loss - float(loss_of(logits, labels) / count)) < 1e-5
        for got, want in zip(map(torch.from_numpy, found), gradients):
            torch.testing.assert_close(got, want / count, rtol=1e-3, atol=1e-5)


def microbatch(replica, number):
    """Unequally many documents and tokens."""
    draws = torch.Generator().manual_seed(10 * replica + number)
    lengths = [[19, 4, 1], [3, 9], [30], [8, 6, 2, 5]][2 * number + replica]
    return pack(
        [torch.randint(VOCABULARY, (n,), generator=draws) for n in lengths], first_document=0
    )


def test_a_mesh_with_ddp_and_accumulation():
    """2 replicas of 2 ranks; the clipped gradients and their norm are those of one process."""

    def body(rank):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = torch.nn.parallel.DistributedDataParallel(build(llama, "waybill"))
        attention = SharedAttention(mesh["cp"], model.module.config, block_tokens=4, in_place=True)
        wholes = [microbatch(rank // 2, number) for number in range(2)]
        at = [(0, 10, len(whole.tokens)) for whole in wholes]
        parts = [w.cut(a[rank % 2], a[rank % 2 + 1]) for w, a in zip(wholes, at)]
        count = torch.tensor(sum(int((part.labels >= 0).sum()) for part in parts))
        torch.distributed.all_reduce(count)
        for part in parts:
            batch = attention.plan(attention.gather(part.pieces))
            labels = part.labels[None]
            loss = model(
                part.tokens[None], position_ids=batch.position_ids(), waybill=batch,
                labels=labels, shift_labels=labels, num_items_in_batch=count, use_cache=False,
            ).loss  # fmt: skip
            (loss * 4).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return float(norm), [p.grad.numpy() for p in model.parameters()]

    model = build(llama, "eager")
    wholes = [microbatch(replica, number) for replica in range(2) for number in range(2)]
    count = sum(int((whole.labels >= 0).sum()) for whole in wholes)
    for whole in wholes:
        for document in whole.tokens.split([piece.length for piece in whole.pieces]):
            logits = model(document[None], use_cache=False).logits[0]
            (loss_of(logits[:-1], document[1:]) / count).backward()
    want = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for norm, gradients in ranks.run(WORLD, body):
        assert abs(norm - want) < 1e-4 * want
        for got, weight in zip(map(torch.from_numpy, gradients), model.parameters()):
            torch.testing.assert_close(got, weight.grad, rtol=1e-3, atol=1e-5)


ROWS = torch.zeros(1, 5, dtype=torch.int64)


def test_labels_that_the_model_would_shift_are_refused(call):
    """They would be shifted over the ends of documents and of ranks."""
    expected = r"LlamaForCausalLM: labels without shift_labels, expected shift_labels="
    call(InvalidArgument, expected, labels=ROWS)
    call(InvalidArgument, expected, labels=ROWS, num_items_in_batch=3)


def test_a_loss_of_one_ranks_labels_is_refused():
    """Its mean is not the mean over the labels of all."""

    def body(rank):
        model = build(llama, "waybill")
        batch = SharedAttention(None, model.config).plan([[3, 2], [5]])
        given = {"position_ids": batch.position_ids(), "waybill": batch, "use_cache": False}
        with pytest.raises(InvalidArgument, match="num_items_in_batch is None on one of 2 ranks"):
            model(ROWS, labels=ROWS, shift_labels=ROWS, **given)

    ranks.run(2, body)


def test_losses_of_other_kinds_are_refused():
    """They are given neither shift_labels nor the number of labels."""

    def body(world):
        torch.manual_seed(3)
        model = LlamaForTokenClassification(LlamaConfig(**SIZES))
        model.set_attn_implementation("waybill")
        batch = SharedAttention(world, model.config).plan([[3, 2]])
        given = {"position_ids": batch.position_ids(), "waybill": batch, "use_cache": False}
        with pytest.raises(InvalidArgument, match="num_items_in_batch is None"):
            model(ROWS, labels=ROWS, **given)

    run_threads(1, body)


def test_losses_of_other_models_stay():
    """Of another attention, and those that the user sets."""
    model = build(llama, "eager")
    assert model.loss_function is ForCausalLMLoss
    model(ROWS, labels=ROWS).loss.backward()
    model.set_attn_implementation("waybill")
    assert model.loss_function is not ForCausalLMLoss

    def mine(logits, labels, **given):
        return logits.sum() * given["waybill"].first.world_size

    model.loss_function = mine
    assert model.loss_function is mine
    model.loss_function = ForCausalLMLoss
    assert model.loss_function is not ForCausalLMLoss


def test_models_that_hide_their_positions():
    """What does not reach attention cannot be looked at: those of the batch must have been asked
    for.
    """

    def body(world):
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4}
        dropped = {f"{name}_pdrop": 0.0 for name in ("attn", "embd", "resid")}
        model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, **dropped))
        model.set_attn_implementation("waybill")
        attention = SharedAttention(world, model.config, kv_heads=1)
        with pytest.raises(InvalidArgument, match="rank 0: position_ids did not reach attention"):
            model(ROWS, waybill=attention.plan([[3, 2]]), use_cache=False)
        batch = attention.plan([[3, 2]])
        model(ROWS, waybill=batch, use_cache=False, position_ids=batch.position_ids())

    run_threads(1, body)


def test_positions_of_rows_are_refused(call):
    """What the model counts where none are given, or what another batch has."""
    call(InvalidArgument, r"rank 0: position_ids are not those of the documents", position_ids=None)
    other = torch.tensor([[0, 1, 2, 3, 0]])
    call(InvalidArgument, r"rank 0: position_ids are not those", position_ids=other)


def test_positions_that_are_equal_are_taken():
    def body(world):
        model = build(llama, "waybill")
        batch = SharedAttention(world, model.config).plan([[3, 2]])
        mine = torch.tensor([[0, 1, 2, 0, 1]])
        for _ in range(2):
            model(torch.zeros_like(mine), position_ids=mine, waybill=batch, use_cache=False)
        assert batch._right() is mine

    run_threads(1, body)


def test_odd_configurations_and_plans():
    def body(world):
        for config in (None, 3, "llama", {}):
            with pytest.raises(InvalidArgument, match="SharedAttention: config = "):
                SharedAttention(world, config)
        attention = SharedAttention(world, LlamaConfig(**SIZES))
        for plans in (None, 3, "x", [1]):
            with pytest.raises(InvalidArgument, match="batch: rank 0: plans is a "):
                attention.batch(plans)
        with pytest.raises(InvalidArgument, match=r"plans\[None\] is a int, expected a Batch"):
            attention.batch({None: 3})

    run_threads(1, body)


@pytest.mark.parametrize("kind", [llama, bloom])
def test_models_with_another_attention(kind):
    """They would ignore the plan: rows would see those of their own rank alone."""

    def body(world):
        model = kind()
        attention = SharedAttention(world, model.config)
        if kind is bloom:  # has none that can be set; transformers warns
            model.set_attn_implementation("waybill")
        with pytest.raises(InvalidArgument, match=r"rank 0: .* is '(sdpa|eager)', expected"):
            attention.plan([[3, 2]])

    run_threads(1, body)


def test_plans_for_all_windows():
    def body(world):
        config = MistralConfig(**SIZES, head_dim=8, sliding_window=7)
        attention = SharedAttention(world, config)
        with pytest.raises(InvalidArgument, match="rank 0: plans have none for window 7"):
            attention.batch({})

    run_threads(1, body)
