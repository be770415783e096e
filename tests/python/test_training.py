"""examples/python/training.py as docs/training.md starts it; it checks its own gradients. And the
loop of train_moe.py, which has attention and experts, against one process.
"""

import ast
import pathlib
import sys

import pytest
from rank_processes import launched, run_file
from test_process_worlds import expect_all_well, run_ranks
from wrapping import needs_fully_shard

torch = pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).resolve().parent.parent.parent / "examples/python/training.py"
STEPS = ("--steps", "8")


def run(folder, *arguments, ranks=(None,)):
    """What the first of the processes prints."""
    ends = run_file(folder, PROGRAM, arguments, ranks, timeout=300)
    assert all(status == 0 for status, _ in ends), ends
    return ends[0][1]


def test_threads(tmp_path):
    """Mixed precision, checkpoints, and a loader of its own process; 30 steps run elsewhere."""
    how = ("--ranks", "3", *STEPS, "--bf16", "--checkpoint", "--workers", "1")
    shown = run(tmp_path, *how)
    assert shown.startswith("3 ranks as threads on cpu\n") and "all gradients, as of one" in shown


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ("--wrap", "ddp", "--compile", "aot_eager")), (4, ("--wrap", "fsdp", "--dp", "2"))],
)
def test_processes(tmp_path, ranks, options):
    if "fsdp" in options:
        needs_fully_shard()
    shown = run(tmp_path, *STEPS, *options, ranks=launched(ranks))
    assert f"{ranks} ranks as processes on cpu" in shown
    assert "all gradients, as of one process" in shown


PLANS = """
import os
import pathlib
import sys

sys.path.insert(0, "{examples}")
import torch
import training
import waybill.torch as waybill

WHO = pathlib.Path("{folder}", "who")
SIZES = (training.HEADS, training.KV_HEADS, training.HEAD)


class Planner:
    def __init__(self, planner):
        self.planner = planner

    def plan(self, lengths):
        with WHO.open("a") as file:
            print(os.getpid(), file=file)
        return self.planner.plan(lengths)


def main():
    own = waybill.BatchPlanner(2, *SIZES, dtype="float32", block_tokens=16, in_place=True)
    batches = []
    for rank in range(2):
        documents = training.Documents(rank, range(2), Planner(own), 3)
        loader = torch.utils.data.DataLoader(documents, batch_size=None, num_workers=1)
        batches.append(list(loader))
    makers = WHO.read_text().split()
    assert len(makers) == 6 and len(set(makers)) == 2 and str(os.getpid()) not in makers

    def body(world):
        attend = waybill.ContextParallelAttention(
            world, *SIZES, dtype=torch.float32, block_tokens=16, in_place=True,
            kernel="dot_product",
        )
        for step, (packed, plan) in enumerate(batches[world.rank]):
            here = own.plan([[len(d) for d in training.documents_of(step, r)] for r in range(2)])
            assert plan is not here and plan.qkv_plan == here.qkv_plan
            assert plan.work.max() > 0 and plan.home_tokens[world.rank] == len(packed.tokens)
            random = torch.Generator().manual_seed(10 * step + world.rank)
            q, k, v = (
                torch.randn(len(packed.tokens), n, training.HEAD, generator=random)
                for n in (training.HEADS, training.KV_HEADS, training.KV_HEADS)
            )
            attend.prepare(plan)
            assert torch.equal(attend(plan, q, k, v), attend(here, q, k, v))
        attend.close()

    waybill.run_threads(2, body)
    print("plans of workers are as those made here")


if __name__ == "__main__":
    main()
"""


def test_worker_processes_plan_ahead(tmp_path):
    """Plans of the example's loader are made in other processes, come here as pickles, and are
    those that this process makes; outputs have the same bits.
    """
    program = tmp_path / "plans.py"
    program.write_text(PLANS.format(examples=PROGRAM.parent, folder=tmp_path))
    ((status, shown),) = run_file(tmp_path, program, timeout=120)
    assert status == 0 and shown.endswith("as those made here\n"), shown


ROOT = PROGRAM.parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_python_docs import blocks_of  # noqa: E402
from extract_doc_examples import pages  # noqa: E402


def programs_with_threads():
    """(name, source) of the blocks of pages, and of the examples, whose ranks may be threads."""
    for page in pages():
        for block in blocks_of(page) if page.is_file() else ():
            if block.info == ["python"]:
                yield block.place(), block.text
    for example in sorted(PROGRAM.parent.glob("*.py")):
        yield example.name, example.read_text(encoding="utf-8")


def draws_in_ranks(source):
    """Lines in functions of a rank's world that draw parameters, or seed, from torch's generator,
    which threads share: each rank would get others.
    """
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if "world" not in [argument.arg for argument in function.args.args]:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name == "torch.manual_seed" or name.endswith((".Linear", ".Embedding")):
                    yield node.lineno, name


def test_no_page_builds_a_model_in_ranks_that_are_threads():
    found = [
        f"{name}, line {line}: {call}"
        for name, source in programs_with_threads()
        if "run_threads" in source
        for line, call in draws_in_ranks(source)
    ]
    assert not found, found
    seeded = "def rank_main(world):\n    torch.manual_seed(0)\n    return nn.Linear(2, 2)\n"
    assert [line for line, _ in draws_in_ranks(seeded)] == [2, 3]


BOTH = """
    import sys

    sys.path.insert(0, "{examples}")
    import copy
    import torch
    import train_moe
    from torch import distributed, nn
    from torch.nn import functional as F
    import waybill.torch as waybill

    torch.set_num_threads(1)
    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    dp = {dp}
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", (dp, W // dp), mesh_dim_names=("dp", "cp")
    )

    def full(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def everyone(tensor):
        parts = [torch.empty_like(tensor) for _ in range(W)]
        distributed.all_gather(parts, tensor)
        return torch.cat(parts)

    class Alone(nn.Module):
        \"\"\"All experts, and the shared one, without Waybill.\"\"\"

        def __init__(self, layer):
            super().__init__()
            first, _, second = layer.shared  # sharded; load_state_dict gives their values
            sizes = [(part.in_features, part.out_features) for part in (first, second)]
            self.shared = nn.Sequential(nn.Linear(*sizes[0]), nn.SiLU(), nn.Linear(*sizes[1]))
            self.experts = copy.deepcopy(layer.experts)
            for name, weight in layer.experts.named_parameters():
                setattr(self.experts, name, nn.Parameter(everyone(weight.data)))

        def forward(self, x, scores, ids):
            out = self.shared(x)
            for k in range(train_moe.TOPK):
                gate, up, down = (weight[ids[:, k]] for weight in self.experts.parameters())
                inner = F.silu(torch.einsum("th,thi->ti", x, gate))
                inner = inner * torch.einsum("th,thi->ti", x, up)
                out = out + scores[:, k, None] * torch.einsum("ti,tih->th", inner, down)
            return out

    def plain_attention(pieces, q, k, v):
        heads = []
        for document in zip(*(waybill.unpack(t, pieces) for t in (q, k, v))):
            given = (t.transpose(0, 1) for t in document)
            heads.append(F.scaled_dot_product_attention(*given, is_causal=True).transpose(0, 1))
        return torch.cat(heads)

    attention, model = train_moe.make_model(mesh, torch.float32)
    alone = train_moe.Model(plain_attention, lambda: nn.Identity())
    for block, its in zip(alone.blocks, model.blocks):
        block.experts = Alone(its.experts)
    of_all, own = train_moe.parameters(model)
    assert len(own) == 3 * train_moe.BLOCKS and own.keys() < dict(model.named_parameters()).keys()
    alone.load_state_dict({name: full(p.data) for name, p in of_all.items()}, strict=False)

    every = [train_moe.documents(0, rank) for rank in range(W)]
    got = train_moe.gradients(attention, model, every[me])

    whole = waybill.pack([document for documents in every for document in documents])
    logits = alone(whole.pieces, whole.tokens, whole.positions)
    want = F.cross_entropy(logits, whole.labels)
    want.backward()
    close = {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(got, float(want), **close)
    theirs = dict(alone.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        if name in own:
            wanted = wanted.chunk(W)[me]
        assert wanted.any(), name
        torch.testing.assert_close(
            full(parameter.grad), wanted, msg=lambda m: name + ": " + m, **close
        )
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


SAVES = """
    import sys

    sys.path.insert(0, "{examples}")
    import pathlib
    import torch
    import train_moe
    from torch import distributed

    torch.set_num_threads(1)
    me, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method="file://{folder}/group", rank=me, world_size=W
    )
    mesh = distributed.device_mesh.init_device_mesh(
        "cpu", ({dp}, W // {dp}), mesh_dim_names=("dp", "cp")
    )
    train_moe.train(mesh, torch.float32, {steps}, pathlib.Path("{saved}"))
    distributed.destroy_process_group()
    print("rank", me, "of", W, "is well")
"""


def run_moe(folder, program, world_size, dp, **more):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no _grouped_mm")
    needs_fully_shard()
    folder.mkdir(exist_ok=True)
    for name, value in {"folder": folder, "examples": PROGRAM.parent, "dp": dp, **more}.items():
        program = program.replace(f"{{{name}}}", str(value))
    expect_all_well(run_ranks(folder, program, world_size))


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("world_size", "dp"), [(1, 1), (2, 1), (4, 2)])
def test_attention_and_experts_in_one_loop(tmp_path, world_size, dp):
    """Loss and all gradients of a step are those of one process: one convention for both modules
    and FSDP, of which an optimizer such as AdamW would hide another.
    """
    run_moe(tmp_path, BOTH, world_size, dp)


@pytest.mark.xdist_group("processes")
def test_other_ranks_load_what_was_saved(tmp_path):
    """Two ranks train and save; four load, train no step, and save: all values are the same."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved, states = tmp_path / "saved", []
    for world_size, dp, steps in ((2, 1, 2), (4, 2, 0)):
        run_moe(tmp_path / str(world_size), SAVES, world_size, dp, steps=steps, saved=saved)
        dcp_to_torch_save(saved, tmp_path / "state.pt")
        states.append(torch.load(tmp_path / "state.pt")["training"])
    assert states[0]["step"] == 2
    name = "blocks.0.experts.experts.gate"
    assert states[0]["model"][name].shape[0] == 8
    moments = states[0]["optimizer"]["state"][name]["exp_avg"]
    assert moments.flatten(1).any(1).all()
    groups = [state["optimizer"].pop("param_groups") for state in states]
    assert groups[0] == groups[1]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
