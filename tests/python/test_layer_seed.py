"""What Triton-distributed's page shows of a layer, and which of its results require gradients."""

import copy
import dataclasses

import pytest
from error_texts import cannot_be_copied

import waybill
from waybill.moe import EPAllToAllLayoutDesc, EPConfig, simulate_dispatch

torch = pytest.importorskip("torch")

from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import DispatchCombineContext, EPAll2AllLayer  # noqa: E402

WORLD, HIDDEN, TOPK, EXPERTS, MAX = 4, 8, 2, 8, 6
SEVEN = (
    "num_dispatch_token_cur_rank", "num_input_tokens_per_rank", "send_reqs_recv_tensor",
    "topk_indices_tensor", "token_dst_scatter_idx", "skipped_token_mapping_indices",
    "skipped_token_topk_mapping_indices",
)  # fmt: skip


def layer_on(world, per_node=WORLD, **options):
    return EPAll2AllLayer(
        world, MAX, HIDDEN, TOPK, world.rank, EXPERTS, per_node, WORLD, torch.float32, **options
    )


def ids_of(expert):
    return torch.full((3, TOPK), expert, dtype=torch.int64)


@pytest.mark.parametrize("per_node", [4, 2])
@pytest.mark.parametrize("options", [{}, {"fixed_rows": 40}, {"rows": "compact"}])
def test_plain_inference_in_grad_mode_requires_nothing(per_node, options):
    def body(world):
        layer = layer_on(world, per_node, **options)
        for expert in (0, 5, EXPERTS):  # to one rank, another one, to nobody
            rows, weights, layout = layer.dispatch(
                torch.ones(3, HIDDEN), ids_of(expert), torch.ones(3, TOPK)
            )
            sums = layer.combine(rows * 2, layout)
            assert not any(t.requires_grad for t in (rows, weights, sums))
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=per_node, timeout_s=10)


@pytest.mark.parametrize("per_node", [4, 2])
@pytest.mark.parametrize("receiver", range(WORLD))
def test_experts_alone_require_gradients(per_node, receiver):
    """One rank has rows; the others, which skip their experts, take part in backward."""

    def body(world):
        layer = layer_on(world, per_node)
        scale = torch.full((HIDDEN,), 2.0, requires_grad=True)
        losses = []
        for _ in range(3):  # dispatches before their combines, too
            made = [layer.dispatch(torch.ones(3, HIDDEN), ids_of(2 * receiver)) for _ in range(2)]
            for rows, _, layout in made:
                out = rows * scale if len(rows) else torch.empty(0, HIDDEN)
                sums = layer.combine(out, layout)
                assert sums.requires_grad
                losses.append(sums.sum())
            with torch.no_grad():
                rows, _, layout = layer.dispatch(torch.ones(3, HIDDEN), ids_of(2 * receiver))
                assert not layer.combine(rows * scale, layout).requires_grad
        sum(losses).backward()
        layer.finalize()
        return scale.grad

    grads = run_threads(WORLD, body, ranks_per_node=per_node, timeout_s=10)
    for rank, grad in enumerate(grads):
        if rank == receiver:
            assert torch.equal(grad, torch.full((HIDDEN,), 6.0 * 3 * TOPK * WORLD))
        else:
            assert grad is None


def test_ranks_with_rows_that_differ_are_told():
    def body(world):
        layer = layer_on(world)
        ids = torch.tensor([[0, 2]] * 3)  # ranks 0 and 1 have rows
        rows, _, layout = layer.dispatch(torch.ones(3, HIDDEN), ids)
        rows.requires_grad_(world.rank == 0)
        with pytest.raises(waybill.Disagreement, match="needs_gradients = "):
            layer.combine(rows, layout)

    run_threads(WORLD, body, timeout_s=10)


def test_a_bias_alone_requires_gradients_where_it_is():
    def body(world):
        layer = layer_on(world)
        rows, _, layout = layer.dispatch(torch.ones(3, HIDDEN), ids_of(0))
        bias = torch.ones(3, HIDDEN, requires_grad=world.rank == 1)
        sums = layer.combine(rows, layout, biases=[bias])
        assert sums.requires_grad == (world.rank == 1)
        if world.rank == 1:  # no call: the others have none
            sums.sum().backward()
            assert bool((bias.grad == 1).all())
        layer.finalize()

    run_threads(WORLD, body, timeout_s=10)


def test_weights_alone_require_gradients():
    def body(world):
        layer = layer_on(world)
        weights = torch.ones(3, TOPK, requires_grad=True)
        rows, row_weights, layout = layer.dispatch(torch.ones(3, HIDDEN), ids_of(0), weights)
        out = rows * row_weights[:, None] if len(rows) else torch.empty(0, HIDDEN)
        sums = layer.combine(out, layout)
        assert sums.requires_grad and not rows.requires_grad
        sums.sum().backward()
        layer.finalize()
        return weights.grad

    for grad in run_threads(WORLD, body, timeout_s=10):
        assert torch.equal(grad, torch.full((3, TOPK), float(HIDDEN)))


def test_it_is_a_module_with_the_attributes():
    def body(world):
        layer = layer_on(world, 2, num_sm=7, use_aot=True)
        assert isinstance(layer, torch.nn.Module)
        found = {name: getattr(layer, name) for name in (
            "max_tokens", "hidden", "topk", "rank", "world_size", "local_world_size", "nnodes",
            "node_id", "is_intra_node", "num_tot_experts", "experts_per_rank", "dtype",
            "weight_dtype", "offset_dtype", "num_sm", "use_aot", "enable_local_combine",
        )}  # fmt: skip
        assert found == {
            "max_tokens": MAX, "hidden": HIDDEN, "topk": TOPK, "rank": world.rank,
            "world_size": WORLD, "local_world_size": 2, "nnodes": 2, "node_id": world.rank // 2,
            "is_intra_node": False, "num_tot_experts": EXPERTS, "experts_per_rank": 2,
            "dtype": torch.float32, "weight_dtype": torch.float32, "offset_dtype": torch.int32,
            "num_sm": 7, "use_aot": True, "enable_local_combine": False,
        }  # fmt: skip
        assert layer.ep_group is world and layer.world is world
        model = torch.nn.Sequential(layer, torch.nn.Linear(HIDDEN, 1))
        model.eval().requires_grad_(False).to(torch.float32)
        assert not layer.training and len(list(layer.parameters())) == 0
        weights = torch.ones(3, TOPK, requires_grad=True)
        layer.dispatch(torch.ones(3, HIDDEN), ids_of(0), weights)  # makes its small layer
        assert list(model.state_dict()) == ["1.weight", "1.bias"]
        assert len(list(layer.modules())) == 1 and "max_tokens=6" in repr(model)
        with pytest.raises(TypeError, match=cannot_be_copied("EPAll2AllLayer")):
            copy.deepcopy(model)
        layer.finalize()

    run_threads(WORLD, body, ranks_per_node=2, timeout_s=10)


def test_a_descriptor_of_seven_attributes():
    values = [3, *(torch.zeros(2) for _ in SEVEN[1:])]
    made = EPAllToAllLayoutDesc(**dict(zip(SEVEN, values)))
    assert all(getattr(made, name) is value for name, value in zip(SEVEN, values))
    assert EPAllToAllLayoutDesc(*values).recv_expert_counts is None
    assert [field.name for field in dataclasses.fields(made)][:7] == list(SEVEN)

    def body(world):
        layer = layer_on(world)
        rows, _, layout = layer.dispatch(torch.ones(3, HIDDEN), ids_of(0))
        copied = EPAllToAllLayoutDesc(*(getattr(layout, name) for name in SEVEN))
        with pytest.raises(waybill.InvalidArgument, match="expected one that dispatch gave"):
            layer.combine(rows, copied)
        layer.combine(rows, layout)
        layer.finalize()

    run_threads(WORLD, body, timeout_s=10)


def test_a_config_may_be_changed_until_it_is_used():
    config = EPConfig(4, 8, 2, 2, 0, 1, 1, torch.float32)
    config.num_experts, config.topk = 4, 1
    assert config.num_experts_per_rank == 4 and config == EPConfig(
        4, 8, 1, 4, 0, 1, 1, torch.float32
    )
    config.world_size = 3  # on the way to something else, perhaps
    with pytest.raises(waybill.InvalidArgument, match="world_size"):
        DispatchCombineContext.create(config)
    config.world_size = 1

    def body(world):
        context = DispatchCombineContext.create(config, world=world)
        layer = EPAll2AllLayer(world, 4, 8, 1, 0, 4, 1, 1, torch.float32)
        for made in (context.ep_config, layer.ep_config):
            with pytest.raises(waybill.InvalidArgument, match=r"EPConfig: topk = 2 .*replace"):
                made.topk = 2
            other = dataclasses.replace(made, topk=2)
            other.topk = 3
            assert copy.deepcopy(made) == made
        config.topk = 2  # the caller's own
        assert context.ep_config.topk == 1
        context.finalize()
        layer.finalize()

    run_threads(1, body)
    simulated = simulate_dispatch(config, [torch.ones(1, 8).numpy()], [[[0, 1]]])
    with pytest.raises(waybill.InvalidArgument, match="EPConfig: topk"):
        simulated.config.topk = 1


def test_tables_are_int32_and_nothing_else():
    sizes = {"max_tokens": 4, "hidden": 8, "topk": 2, "num_experts": 4}
    ranks = {"rank": 0, "world_size": 2, "local_world_size": 2}
    assert EPConfig(**sizes, **ranks, offset_dtype=torch.int32).offset_dtype == torch.int32
    for dtype, text in (
        ("int64", "offset_dtype = int64, expected int32"),
        (object(), "offset_dtype"),
    ):
        with pytest.raises(waybill.InvalidArgument, match=f"EPConfig: {text}"):
            EPConfig(**sizes, **ranks, offset_dtype=dtype)
