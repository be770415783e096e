"""The module on ranks that are processes: of a group, and of a mesh with other dimensions."""

import pathlib

import pytest
from test_process_worlds import expect_all_well, run_ranks
from wrapping import needs_fully_shard

pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("processes")

START = """
    import sys

    sys.path.insert(0, "{tests}")
    import torch
    from torch import distributed
    from packed import close, leaves_of, pieces_in_order, tensors_of, whole
    from waybill.torch import ContextParallelAttention

    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )

    def steps(attend, seed):
        rank, size = attend.world.rank, attend.world.world_size
        for step in range(3):
            pieces = pieces_in_order([70 + seed, 9, 33 + step], size)
            tensors = tensors_of(pieces, 4, 2, 8, 8, seed + step)
            plan = attend.plan(attend.gather(pieces[rank]))
            q, k, v = leaves_of(tensors[rank])
            out = attend(plan, q, k, v)
            (out * tensors[rank][3]).sum().backward()
            close([out.detach(), q.grad, k.grad, v.grad], whole(pieces, tensors)[rank][:4])
"""
OPTIONS = "4, 2, 8, dtype=torch.float64, in_place=True, block_tokens=4, timeout_s=100"


def start(tmp_path):
    tests = pathlib.Path(__file__).parent
    return START.replace("{folder}", str(tmp_path)).replace("{tests}", str(tests))


def test_a_mesh_and_ddp(tmp_path):
    end = f"""
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (1, 2, 1), mesh_dim_names=("dp", "cp", "tp")
    )
    attend = ContextParallelAttention(mesh["cp"], {OPTIONS})
    steps(attend, 10)
    attend.close()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 64, dtype=torch.float64)
            self.attend = ContextParallelAttention(None, {OPTIONS})

        def forward(self, plan, x):
            q, k, v = self.qkv(x).unflatten(1, (8, 8)).split([4, 2, 2], 1)
            return self.attend(plan, q, k, v)

    torch.manual_seed(0)
    model = Model()
    assert set(model.state_dict()) == {{"qkv.weight", "qkv.bias"}}
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    pieces = pieces_in_order([70, 9, 33], W)
    plan = model.attend.plan(pieces)
    x = tensors_of(pieces, 1, 1, 16, 16)[me][0][:, 0]
    (wrapped(plan, x).sum() * W).backward()
    everything = [torch.zeros_like(model.qkv.weight.grad) for _ in range(W)]
    distributed.all_gather(everything, model.qkv.weight.grad)
    assert torch.equal(everything[0], everything[1])
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """
    expect_all_well(run_ranks(tmp_path, start(tmp_path) + end, world_size=2))


def test_prefixes(tmp_path):
    end = """
    from test_context_parallel_prefix import dense, of_rank, tensors_of
    from waybill.torch import World

    pieces = [[(0, 0, 30, 37), (1, 0, 4, 0)], [(0, 30, 30, 37)]]
    tensors = tensors_of(pieces, 9)
    got = of_rank(World.from_process_group(timeout_s=100), pieces[me], tensors[me])
    close(got[:4], dense(pieces, tensors)[me][:4])
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """
    expect_all_well(run_ranks(tmp_path, start(tmp_path) + end, world_size=2))


MODEL = f"""
    class Model(torch.nn.Module):
        def __init__(self, group, heads=4, kv_heads=2):
            super().__init__()
            self.split = [heads, kv_heads, kv_heads]
            self.qkv = torch.nn.Linear(16, 8 * sum(self.split), dtype=torch.float64)
            self.attend = ContextParallelAttention(group, heads, kv_heads, {OPTIONS[6:]})

        def forward(self, plan, x):
            q, k, v = self.qkv(x).unflatten(1, (-1, 8)).split(self.split, 1)
            return self.attend(plan, q, k, v)

    def parts_of(weight, heads, kv_heads, part, of):
        \"\"\"Rows of a tensor-parallel rank's heads.\"\"\"
        q, k, v = weight.unflatten(0, (-1, 8)).split([heads, kv_heads, kv_heads])
        return torch.cat([t.chunk(of)[part] for t in (q, k, v)]).flatten(0, 1)

    def expected(weight, bias, pieces, inputs, weights):
        \"\"\"Gradient of the projection of all ranks' tokens, by one process.\"\"\"
        leaves = [t.detach().clone().requires_grad_() for t in (weight, bias)]
        qkv = [torch.nn.functional.linear(x, *leaves).unflatten(1, (-1, 8)) for x in inputs]
        tensors = [[*one.split([4, 2, 2], 1), w] for one, w in zip(qkv, weights)]
        found = whole(pieces, tensors)
        grads = [torch.cat(g[1:4], 1).flatten(1) for g in found]
        torch.autograd.backward([t.flatten(1) for t in qkv], grads)
        return leaves[0].grad, leaves[1].grad

    def batch_of(size):
        pieces = pieces_in_order([70, 9, 33], size)
        tensors = tensors_of(pieces, 4, 2, 8, 8)
        inputs = [t[0][:, 0] for t in tensors_of(pieces, 1, 1, 16, 16, seed=5)]
        return pieces, inputs, [t[3] for t in tensors]
"""


def test_a_model_in_shards(tmp_path):
    """FSDP2 over the context-parallel ranks: gradients of the sum of losses, by one process."""
    needs_fully_shard()
    end = """
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (W,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model(mesh["cp"])
    weight, bias = model.qkv.weight.detach().clone(), model.qkv.bias.detach().clone()
    fully_shard(model.qkv, mesh=mesh)
    fully_shard(model, mesh=mesh)
    pieces, inputs, weights = batch_of(W)
    plan = model.attend.plan(pieces)
    for _ in range(2):
        out = model(plan, inputs[me])
        ((out * weights[me]).sum() * W).backward()
    got = [p.grad.full_tensor() / 2 for p in (model.qkv.weight, model.qkv.bias)]
    close(got, expected(weight, bias, pieces, inputs, weights))
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """
    expect_all_well(run_ranks(tmp_path, start(tmp_path) + MODEL + end, world_size=2))


def test_heads_of_tensor_parallel_ranks(tmp_path):
    """Two by two: each tensor rank has half of the heads, of all rows of its context rank."""
    end = """
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    place, part = mesh["cp"].get_local_rank(), mesh["tp"].get_local_rank()
    torch.manual_seed(0)
    everything = torch.nn.Linear(16, 64, dtype=torch.float64)
    weight, bias = everything.weight.detach(), everything.bias.detach()
    model = Model(mesh["cp"], 2, 1)
    with torch.no_grad():
        model.qkv.weight.copy_(parts_of(weight, 4, 2, part, 2))
        model.qkv.bias.copy_(parts_of(bias, 4, 2, part, 2))
    pieces, inputs, weights = batch_of(2)
    out = model(model.attend.plan(model.attend.gather(pieces[place])), inputs[place])
    (out * weights[place].chunk(2, 1)[part]).sum().backward()
    for p in model.parameters():
        distributed.all_reduce(p.grad, group=mesh["cp"].get_group())
    want = [parts_of(t, 4, 2, part, 2) for t in expected(weight, bias, pieces, inputs, weights)]
    close([p.grad for p in model.qkv.parameters()], want)
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """
    expect_all_well(run_ranks(tmp_path, start(tmp_path) + MODEL + end, world_size=4))


def test_a_rank_that_has_run_out_of_documents(tmp_path):
    """It packs none, and its weights have the gradients that DDP adds; a DTensor is refused."""
    end = """
    from torch.distributed.tensor import Replicate, distribute_tensor
    from waybill import InvalidArgument
    from waybill.torch import pack

    torch.manual_seed(0)
    model = Model(None)
    embed = torch.nn.Embedding(40, 16, dtype=torch.float64)
    out = torch.nn.Linear(32, 40, dtype=torch.float64)
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList([model, embed, out]))
    wrapped.module.forward = lambda plan, tokens: out(model(plan, embed(tokens)).flatten(1))
    documents = [[torch.arange(33), torch.arange(9)], []]
    for mine in (documents[me], documents[1 - me], []):
        batch = pack(mine)
        plan = model.attend.plan(model.attend.gather(batch.pieces))
        logits = wrapped(plan, batch.tokens)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
        loss.backward()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        assert total > 0 or not any(plan.home_tokens)
    everything = [torch.zeros_like(embed.weight.grad) for _ in range(W)]
    distributed.all_gather(everything, embed.weight.grad)
    assert torch.equal(everything[0], everything[1]) and everything[0].any()

    mesh = distributed.device_mesh.init_device_mesh("cpu", (W,))
    plan = model.attend.plan([[5], [5]])
    q, k, v = (torch.ones(5, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    try:
        model.attend(plan, distribute_tensor(q, mesh, [Replicate()]), k, v)
    except InvalidArgument as error:
        assert f"q is a DTensor on rank {me}, expected" in str(error), error
    else:
        raise AssertionError("taken")
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """
    expect_all_well(run_ranks(tmp_path, start(tmp_path) + MODEL + end, world_size=2))


def test_one_rank_finds_arguments_wrong(tmp_path):
    """Long before the deadline, which is 100 s here."""
    end = """
    import time
    from waybill import Error

    began = time.monotonic()
    for given in ({"heads": 4 if me == 0 else 0}, {"scale": 0.5 + me}):
        try:
            ContextParallelAttention(None, **{"heads": 4, **given}, dtype="float64", timeout_s=100)
        except Error as error:
            assert "rank 1" in str(error) or "heads = 0" in str(error), error
        else:
            raise AssertionError("taken")
    attend = ContextParallelAttention(None, OPTIONS)
    try:
        attend.gather([5] if me == 0 else ["x"])
    except Error as error:
        assert "pieces of rank 1" in str(error), error
    else:
        raise AssertionError("taken")
    steps(attend, 3)
    assert time.monotonic() - began < 50
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
    """.replace("OPTIONS", OPTIONS)
    expect_all_well(run_ranks(tmp_path, start(tmp_path) + end, world_size=2))
