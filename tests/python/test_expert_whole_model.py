"""A whole model behind DDP or FSDP with experts that each rank has of its own, and the norm of its
gradients, as docs/moe.md says, against one process.
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
    import torch
    from torch import distributed, nn
    import test_expert_parallel as one_process
    from waybill.torch.moe import ExpertParallel

    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    EXPERTS, HIDDEN, TOPK = one_process.EXPERTS, one_process.HIDDEN, one_process.TOPK

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            draws = torch.Generator().manual_seed(6)
            self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
            self.gate.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=draws))
            own = one_process.own_experts(me, "cpu")
            self.experts = ExpertParallel(
                own, dtype=torch.float32, gradients="mean", **one_process.SIZES
            )

        def forward(self, x):
            return self.experts(x, *self.gate(x).softmax(-1).topk(TOPK))

    def alone(batches):
        gate, everything = Model().gate, one_process.all_experts()
        losses = []
        for x in batches:
            scores, ids = gate(x).softmax(-1).topk(TOPK)
            out = torch.zeros_like(x)
            for k in range(TOPK):
                first, up, down = (weight[ids[:, k]] for weight in everything.parameters())
                inside = nn.functional.silu(torch.einsum("th,thi->ti", x, first))
                inside = inside * torch.einsum("th,thi->ti", x, up)
                out = out + scores[:, k, None] * torch.einsum("ti,tih->th", inside, down)
            losses.append(out.square().mean())
        (sum(losses) / len(losses)).backward()
        return gate.weight.grad, [weight.grad for weight in everything.parameters()]

    def clip(of_all, own, most, group=None):
        squares = [
            torch.stack([g.square().sum() for g in gradients]).sum() for gradients in (of_all, own)
        ]
        distributed.all_reduce(squares[1], group=group)
        norm = (squares[0] + squares[1]).sqrt()
        for gradient in (*of_all, *own):
            gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    model = Model()
    own = {name for name, _ in model.named_parameters() if name.startswith("experts.experts.")}
    if "{wrapper}" == "ddp":
        DDP = nn.parallel.DistributedDataParallel
        DDP._set_params_and_buffers_to_ignore_for_model(model, own)
        wrapped = DDP(model)
    else:
        from torch.distributed.fsdp import fully_shard
        mesh = distributed.device_mesh.init_device_mesh("cpu", (W,))
        ignored = {p for name, p in model.named_parameters() if name in own}
        wrapped = fully_shard(model, mesh=mesh, ignored_params=ignored)
    x = [one_process.batch(rank)[0] for rank in range(W)]
    wrapped(x[me]).square().mean().backward()

    of_gate, of_experts = alone(x)
    def whole(gradient):
        return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    gate = whole(model.gate.weight.grad)
    mine = [weight.grad for weight in model.experts.experts.parameters()]
    at = slice(me * one_process.LOCAL, (me + 1) * one_process.LOCAL)
    torch.testing.assert_close(gate, of_gate, rtol=1e-4, atol=1e-6)
    for got, want in zip(mine, of_experts):
        torch.testing.assert_close(got, want[at], rtol=1e-4, atol=1e-6)
    everything = [of_gate, *of_experts]
    norm = torch.stack([one.square().sum() for one in everything]).sum().sqrt()
    torch.testing.assert_close(clip([gate], mine, 0.01), norm)
    torch.testing.assert_close(mine[0], of_experts[0][at] * 0.01 / norm, rtol=1e-4, atol=1e-6)
    model.experts.finalize()
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_gradients_and_their_norm(tmp_path, wrapper):
    run_wrapped(tmp_path, WRAPPED, wrapper, world_size=2)
