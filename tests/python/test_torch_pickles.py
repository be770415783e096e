"""Tables of tensors travel between processes, as a DataLoader's workers and groups send them."""

import copy
import pickle

import pytest
from error_texts import cannot_be_copied
from test_pickles import LENGTHS, facts, refuses, work_of_a_worker
from test_process_worlds import expect_all_well, run_ranks

import waybill

torch = pytest.importorskip("torch")

import waybill.torch as wt  # noqa: E402
from waybill.moe import EPConfig  # noqa: E402
from waybill.torch.moe import (  # noqa: E402
    BarrierAllContext,
    DispatchCombineContext,
    EPAll2AllLayer,
    ExpertParallel,
    SwiGLUExperts,
)


def tables():
    plan = waybill.plan(LENGTHS, 4, 512, kv_layout="per_query").to_qkv_plan()
    metadata = wt.plan_metadata(plan)
    return [
        *metadata[:4], metadata.fwd_q.get_slice(2), metadata.rev_kv.normalize_dtype(), metadata,
        wt.mlp_layout_packed_params(torch.tensor([3, 4])), metadata.attention,
    ]  # fmt: skip


def host_facts(value):
    if isinstance(value, torch.Tensor):
        return facts(value.numpy())
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [host_facts(item) for item in value]
    if isinstance(value, waybill.PackedSeqParams):
        return [host_facts(field) for field in vars(value).values()]
    return facts(value)


@pytest.mark.parametrize("place", range(len(tables())))
def test_pickles_and_copies_are_the_same(place):
    value = tables()[place]
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert type(other) is type(value)
        assert host_facts(other) == host_facts(value)


def test_formats_and_configurations():
    for value in (
        wt.TensorFormat(torch.bfloat16, (4, 8)),
        EPConfig(8, 64, 2, 8, 0, 2, 2, torch.float16, torch.bfloat16),
    ):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, seed):
        plan, routing, table, _ = work_of_a_worker(seed)
        return plan, routing, table, wt.plan_metadata(plan)


def as_it_is(value):
    """Without this a DataLoader makes lists of tuples."""
    return value


def test_the_workers_of_a_dataloader_plan():
    loader = torch.utils.data.DataLoader(
        Documents(), batch_size=None, num_workers=1, multiprocessing_context="spawn",
        collate_fn=as_it_is,
    )  # fmt: skip
    found = list(loader)
    assert len(found) == 3
    for seed, (plan, routing, table, metadata) in enumerate(found):
        want = Documents()[seed]
        assert (plan, table) == (want[0], want[2])
        assert facts(routing) == facts(want[1])
        assert isinstance(metadata.fwd_q, wt.Metadata)
        assert host_facts(metadata) == host_facts(want[3])


def test_rank_0_plans_for_all(tmp_path):
    program = f"""
    import torch
    from torch import distributed
    import waybill.torch as wt
    rank = int(os.environ["RANK"])
    group = "file://{tmp_path}/group"
    distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=2)
    lengths = [900, 300, 50, 700]
    plan = waybill.plan(lengths, 2, tokens_per_rank=0)
    planned = wt.BatchPlanner(2, 1, 1, 2, dtype="float32", in_place=False).plan(plan)
    sent = [plan, planned, wt.plan_metadata(plan)] if rank == 0 else [None] * 3
    distributed.broadcast_object_list(sent)
    assert sent[0] == plan and sent[1].qkv_plan == plan.to_qkv_plan()
    assert sent[2].fwd_q == wt.plan_metadata(plan).fwd_q
    world = waybill.World.from_process_group()
    kernel = lambda q, k, v, *_: q * 2
    attend = wt.ContextParallelAttention(
        world, 1, 1, 2, dtype="float32", in_place=False, kernel=kernel
    )
    rows = torch.ones(int(plan.home_tokens[rank]), 1, 2)
    assert attend(sent[1], rows, rows, rows).eq(2).all()
    distributed.destroy_process_group()
    print("rank", rank, "of", 2, "is well")
    """
    expect_all_well(run_ranks(tmp_path, program, world_size=2))


def test_what_cannot_says_why():
    def body(world):
        refuses(world, "World.from_environment")
        dispatcher = wt.SequenceDispatcher(world)
        refuses(dispatcher, "on each rank's world")
        layer = EPAll2AllLayer(world, 4, 8, 1, world.rank, 2, 2, 2, torch.float32)
        refuses(layer, "on each rank's world or group")
        tokens, ids = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
        rows, _, layout = layer.dispatch(tokens, ids)
        with pytest.raises(waybill.WrongType, match=cannot_be_copied("RankLayout")):
            pickle.dumps(layout)
        other = copy.copy(layout)  # the same tables
        assert torch.equal(other.recv_tags, layout.recv_tags)
        layer.combine(rows, other)
        experts = ExpertParallel(
            SwiGLUExperts(1, 8, 4), num_experts=2, topk=1, hidden=8, max_tokens=4, group=world,
            gradients="sum",
        )  # fmt: skip
        refuses(experts, "load its state_dict")
        experts.finalize()
        config = EPConfig(4, 8, 1, 2, world.rank, 2, 2, torch.float32)
        for made in (
            DispatchCombineContext.create(config, world=world),
            BarrierAllContext(world=world),
        ):
            refuses(made, "on each rank")
            made.finalize()
        layer.finalize()
        dispatcher.close()

    wt.run_threads(2, body)
