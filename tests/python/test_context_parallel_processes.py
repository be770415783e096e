"""The module on ranks that are processes: of a group, and of a mesh with other dimensions."""

import pathlib

import pytest
from test_process_worlds import expect_all_well, run_ranks

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
