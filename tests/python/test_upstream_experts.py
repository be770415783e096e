"""Every snippet and every declaration in Triton-distributed's page of its layer."""

import inspect
import re

import numpy as np
import pytest
from upstream import EXPERT_PAGE, snippet, snippets, text_of

import waybill
from waybill.moe import simulate_dispatch

torch = pytest.importorskip("torch")

from waybill.torch import moe, run_threads  # noqa: E402

WORLD = 4
COMMON = {
    "max_tokens": 16, "hidden": 32, "topk": 4, "num_tot_experts": 8, "dtype": torch.float32,
}  # fmt: skip


class Group:
    """In place of torch.distributed, where ranks are processes: the group is the rank's world."""

    def __init__(self, world):
        self.group = type("group", (), {"WORLD": world})


def run_usage(world, per_node):
    """The page's example on a rank; what it names a GPU is the CPU, and ranks are as many as are
    there.
    """
    text = snippet(EXPERT_PAGE, 1).text
    for theirs, ours in (
        ("world_size=32", f"world_size={WORLD}"),
        ("local_world_size=8", f"local_world_size={per_node}"),
        ('device="cuda"', 'device="cpu"'),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    imports = r"^(?:import|from) .*\n"
    assert len(re.findall(imports, text, re.MULTILINE)) == 4
    scope = {
        "torch": torch, "dist": Group(world), "EPAll2AllLayer": moe.EPAll2AllLayer,
        "initialize_distributed": lambda: (world.rank, world.world_size),
        "your_expert_ffn": lambda rows: rows * 2,
    }  # fmt: skip
    exec(re.sub(imports, "", text, flags=re.MULTILINE), scope)
    return scope


@pytest.mark.parametrize("per_node", [4, 2])
def test_basic_usage(per_node):
    """Tensors on ranks; and arrays of all ranks at once, which is the numpy face of the layer."""
    made = run_threads(WORLD, lambda world: run_usage(world, per_node), ranks_per_node=per_node)
    config = moe.EPConfig(256, 7168, 8, 256, 0, WORLD, per_node)
    tokens = [scope["tokens"].float().numpy() for scope in made]
    ids = [scope["expert_ids"].numpy() for scope in made]
    weights = [scope["routing_weights"].numpy() for scope in made]
    expected = simulate_dispatch(config, tokens, ids, weights)
    sums = expected.combine([rows * 2 for rows in expected.recv_tokens])
    for rank, scope in enumerate(made):
        assert np.array_equal(scope["recv_tokens"].float().numpy(), expected.recv_tokens[rank])
        assert np.array_equal(scope["recv_weights"].numpy(), expected.recv_weights[rank])
        assert np.array_equal(scope["combined"].detach().float().numpy(), sums[rank])
        assert scope["combined"].shape == (128, 7168)
        assert scope["combined"].dtype == scope["recv_tokens"].dtype == torch.bfloat16


def layer_of(number, world):
    """A layer as a snippet makes it, with what its `...` leaves out."""
    text = snippet(EXPERT_PAGE, number).text
    text = re.sub(r"world_size=8,", f"world_size={WORLD},", text)
    text = text.replace("...,", "**given,")
    names = {"ep_group": world, "rank": world.rank, **COMMON}
    if "world_size" not in text:
        names |= {"world_size": WORLD, "local_world_size": WORLD}
    scope = {"EPAll2AllLayer": moe.EPAll2AllLayer, "given": names}
    exec(text, scope)
    return scope["ep_layer"]


@pytest.mark.parametrize("number", [2, 3])
def test_options(number):
    """What differs: use_aot changes nothing, since kernels are always compiled ahead of time."""
    assert len(snippets(EXPERT_PAGE)) == 3

    def body(world):
        layer = layer_of(number, world)
        generator = torch.Generator().manual_seed(world.rank)
        tokens = torch.randint(-8, 9, (9, 32), generator=generator).float()
        ids = torch.randint(0, 8, (9, 4), generator=generator)
        rows, weights, layout = layer.dispatch(tokens, ids)
        assert weights is None
        home = layer.combine(rows, layout)
        layer.finalize()
        assert torch.equal(home, 4 * tokens)  # small integers: sums are exact in any order

    run_threads(WORLD, body)


def declared():
    """{class: (signature or None, {method: signature}, {attribute: type})} of the page."""
    found, current = {}, None
    for line in text_of(EXPERT_PAGE).splitlines():
        match = re.match(r"\s*\.\. py:(class|method|attribute|property):: (\w+)(\(.*\))?", line)
        if match and match.group(1) == "class":
            current = found.setdefault(match.group(2), (match.group(3), {}, []))
        elif match and match.group(1) == "method":
            current[1][match.group(2)] = match.group(3)
        elif match:
            current[2].append(match.group(2))
    return found


def parameters(signature):
    scope = {"torch": torch}
    exec(f"def declared{signature}: pass", scope)
    return list(inspect.signature(scope["declared"]).parameters.values())


def expect_call(function, signature):
    """It may be called as the page says; what comes after is by keyword alone. Without num_sm it
    follows the device.
    """
    ours = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    theirs = parameters(signature)
    for mine, given in zip(ours, theirs):
        assert mine.name == given.name and mine.kind == mine.POSITIONAL_OR_KEYWORD
        same_default = given.default in (given.empty, mine.default)
        assert same_default or (given.name == "num_sm" and mine.default is None)
    assert all(p.kind == p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_every_class_and_method_can_be_called_so():
    page = declared()
    assert set(page) == {
        "DispatchCombineContext", "EPAll2AllLayer", "EPAllToAllLayoutDesc", "EPConfig"
    }  # fmt: skip
    for name, (signature, methods, _) in page.items():
        kind = getattr(moe, name)
        if signature is not None:
            expect_call(kind.__init__, signature)
        for method, how in methods.items():
            expect_call(getattr(kind, method), re.sub(r" ->.*", "", how))


def test_every_attribute_is_there():
    page = declared()
    config = moe.EPConfig(4, 8, 2, 8, 0, WORLD, WORLD, "float32")
    values = {name: getattr(config, name) for name in page["EPConfig"][2]}
    assert len(values) == 12 and values["num_experts_per_rank"] == 2
    assert values["is_intra_node"] is True

    names = page["EPAllToAllLayoutDesc"][2]
    assert len(names) == 7

    def body(world, per_node):
        sizes = (4, 8, 2, world.rank, 8, per_node, WORLD, torch.float32)
        layer = moe.EPAll2AllLayer(world, *sizes)
        _, _, layout = layer.dispatch(torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32))
        found = {name: getattr(layout, name) for name in names}
        shapes = {n: tuple(v.shape) for n, v in found.items() if isinstance(v, torch.Tensor)}
        layer.finalize()
        return found["num_dispatch_token_cur_rank"], shapes, layout.token_dst_scatter_idx.dtype

    maps = {"skipped_token_mapping_indices", "skipped_token_topk_mapping_indices"}
    for per_node, nodes in ((4, 1), (2, 2)):
        made = run_threads(WORLD, lambda world: body(world, per_node), ranks_per_node=per_node)  # noqa: B023
        tokens, shapes, dtype = made[1]
        assert tokens == 3 and dtype == torch.int32
        assert shapes["num_input_tokens_per_rank"] == (WORLD,)
        assert shapes["token_dst_scatter_idx"] == (nodes, 4, 2)
        assert shapes["topk_indices_tensor"] in ((3, 2), (nodes, 4, 2))
        assert ("send_reqs_recv_tensor" in shapes) == (nodes > 1)
        assert maps <= set(shapes) or nodes > 1
        if nodes > 1:
            assert shapes["send_reqs_recv_tensor"] == (nodes, 2, 4)


def test_buffers_grow():
    """`Dynamic Buffer Management`, and what a context alone gives."""

    def body(world):
        config = moe.EPConfig(4, 8, 2, 8, world.rank, WORLD, WORLD, torch.float32)
        context = moe.DispatchCombineContext.create(config, world=world)
        assert context.dispatch_output_buf.shape == (4 * 2 * 2, 8)
        output, weights = context.reallocate_dispatch_output_buf(40)
        assert output.shape[0] >= 40 and weights.shape[0] >= 40 and output.shape[1] == 8
        context.finalize()

    run_threads(WORLD, body)


def test_errors_of_this_page_have_names():
    """Ids that no expert has: an error on every rank, where the layer there writes anywhere."""

    def body(world):
        layer = moe.EPAll2AllLayer(world, 4, 8, 2, world.rank, 8, WORLD, WORLD, torch.float32)
        with pytest.raises(waybill.Error, match="exp_indices"):
            layer.dispatch(torch.zeros(3, 8), torch.full((3, 2), 9))

    run_threads(WORLD, body)
