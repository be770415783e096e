"""A whole model behind DDP or FSDP with experts that each rank has of its own, and the norm of its
gradients, against one process. docs/moe.md shows excerpts of the program.
"""

import pytest

pytest.importorskip("torch")

import torch
from wrapping import run_wrapped

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

WRAPPED = """
    import sys

    sys.path.insert(0, "{tests}")
    sys.path.insert(0, os.path.join("{tests}", "../../examples/python"))
    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    import test_expert_parallel as one_process
    from train_moe import clip
    from waybill.torch.moe import ExpertParallel

    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    EXPERTS, HIDDEN, TOPK = one_process.EXPERTS, one_process.HIDDEN, one_process.TOPK

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            draws = torch.Generator().manual_seed(6)
            self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
            self.gate.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=draws))
            own = one_process.own_experts(me, "cpu")
            self.moe = ExpertParallel(
                own, dtype=torch.float32, gradients="mean", **one_process.SIZES
            )

        def forward(self, x):
            return self.moe(x, *self.gate(x).softmax(-1).topk(TOPK))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block()])
            draws = torch.Generator().manual_seed(8)
            self.scale = nn.Parameter(torch.randn(HIDDEN, generator=draws))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x * self.scale

    def alone(batches):
        model, everything = Model(), one_process.all_experts()
        gate = model.blocks[0].gate
        losses = []
        for x in batches:
            scores, ids = gate(x).softmax(-1).topk(TOPK)
            out = torch.zeros_like(x)
            for k in range(TOPK):
                first, up, down = (weight[ids[:, k]] for weight in everything.parameters())
                inside = nn.functional.silu(torch.einsum("th,thi->ti", x, first))
                inside = inside * torch.einsum("th,thi->ti", x, up)
                out = out + scores[:, k, None] * torch.einsum("ti,tih->th", inside, down)
            losses.append((out * model.scale).square().mean())
        (sum(losses) / len(losses)).backward()
        ours = [model.scale.grad, gate.weight.grad]
        return ours, [weight.grad for weight in everything.parameters()]

    wrapper, mesh = "{wrapper}", distributed.device_mesh.init_device_mesh("cpu", (W,))
    model = Model()
    modules = [m for m in model.modules() if isinstance(m, ExpertParallel)]
    own = [p for module in modules for p in module.experts.parameters()]
    if wrapper == "ddp":
        names = {name for name, p in model.named_parameters() if p in set(own)}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
    else:
        for block in model.blocks:  # each call needs it
            fully_shard(block, mesh=mesh, ignored_params=set(own))
        wrapped = fully_shard(model, mesh=mesh, ignored_params=set(own))
    x = [one_process.batch(rank)[0] for rank in range(W)]
    wrapped(x[me]).square().mean().backward()

    replicated, of_experts = alone(x)
    def whole(gradient):
        return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    of_all = [model.scale.grad, model.blocks[0].gate.weight.grad]
    assert all(isinstance(g, DTensor) == (wrapper == "fsdp") for g in of_all)
    mine = [weight.grad for weight in own]
    assert len(mine) == 3
    at = slice(me * one_process.LOCAL, (me + 1) * one_process.LOCAL)
    wanted = [*replicated, *(gradient[at] for gradient in of_experts)]
    for got, want in zip([*of_all, *mine], wanted):
        torch.testing.assert_close(whole(got), want, rtol=1e-4, atol=1e-6)
    norm = torch.stack([one.square().sum() for one in (*replicated, *of_experts)]).sum().sqrt()
    torch.testing.assert_close(clip(of_all, mine, 0.01), norm)
    for parameter, want in zip([model.scale, model.blocks[0].gate.weight, *own], wanted):
        torch.testing.assert_close(
            whole(parameter.grad), want * 0.01 / norm, rtol=1e-4, atol=1e-6
        )
    modules[0].finalize()
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_gradients_and_their_norm(tmp_path, wrapper):
    run_wrapped(tmp_path, WRAPPED, wrapper, world_size=2)
