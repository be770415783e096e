"""Layers, modules and buffers that ranks make together: what one rank has wrong all hear of."""

import time

import pytest

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

from waybill.integrations.deep_ep import Buffer, ElasticBuffer  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts  # noqa: E402

TIMEOUT_S = 20
SIZES = {"num_experts": 4, "topk": 2, "hidden": 8, "max_tokens": 6}


def module_on(world, **options):
    experts = options.pop("experts", SwiGLUExperts(2, 8, 8))
    return ExpertParallel(experts, group=world, **{**SIZES, "gradients": "sum", **options})


def layer_on(world, **options):
    given = {
        "max_tokens": 6, "hidden": 8, "topk": 2, "rank": world.rank, "num_tot_experts": 4,
        "local_world_size": 2, "world_size": 2,
    }  # fmt: skip
    return EPAll2AllLayer(world, **{**given, **options})


def buffer_on(world, **options):
    return Buffer(world, **{"num_nvl_bytes": 1 << 20, **options})


def elastic_on(world, **options):
    return ElasticBuffer(world, **{"num_bytes": 1 << 20, **options})


def dispatcher_on(world, **options):
    return waybill.SequenceDispatcher(world, **options)


def links_on(world, links=None):
    return world.use_links(waybill.LinkSpeeds() if links is None else links)


def errors_of(make, wrong):
    """Rank 1 has something wrong; both are told at once, and can do it right after."""

    def body(world):
        begin = time.perf_counter()
        with pytest.raises(waybill.Error) as error:
            make(world, **(wrong if world.rank == 1 else {}))
        assert time.perf_counter() - begin < TIMEOUT_S / 2, str(error.value)
        make(world)
        return str(error.value)

    return wt.run_threads(2, body, timeout_s=TIMEOUT_S)


def case_name(value):
    return getattr(value, "__name__", str(value))


WRONG_FOR_MODULES = [
    {"gradients": "max"}, {"weights": None}, {"windows": 3}, {"experts": 5}, {"shared": "x"},
    {"topk": 0}, {"topk": "2"}, {"hidden": -1}, {"max_tokens": 0}, {"chunks": 0},
    {"dtype": "nothing"}, {"preset": "fast"}, {"operations": True}, {"fixed_row": 3},
    {"rows": "compact"}, {"fixed_rows": 0}, {"num_sm": 0}, {"capacity": 0},
    {"expert_alignment": -1}, {"device": "cuda"}, {"combine": "push"},
]  # fmt: skip
WRONG_FOR_LAYERS = [
    {"max_tokens": 0}, {"hidden": "8"}, {"topk": 99}, {"rank": 0}, {"num_tot_experts": 3},
    {"local_world_size": 1}, {"world_size": 4}, {"dtype": "nothing"}, {"weight_dtype": 2},
    {"num_sm": 0}, {"enable_local_combine": "no"}, {"dropped_id": 1}, {"rows": "any"},
    {"expert_alignment": 0}, {"expert_alignment": 2**31}, {"payload": 1}, {"capacity": 0},
    {"capacity": 2**40}, {"fixed_rows": 0}, {"fixed_rows": 1.5}, {"copy_out": 2},
    {"device": "cuda"}, {"max_per_expert": 0}, {"max_per_expert": 1.5},
    {"combine": "push"}, {"combine": True}, {"scale_layout": "4x128"}, {"scale_layout": 4},
]  # fmt: skip
WRONG_FOR_BUFFERS = [
    {"num_nvl_bytes": -1}, {"num_rdma_bytes": "x"}, {"low_latency_mode": 3},
    {"enable_shrink": True}, {"comm": 1}, {"explicitly_destroy": "yes"},
]  # fmt: skip
WRONG_FOR_DISPATCHERS = [
    {"num_sms": -1}, {"chunk_bytes": 17}, {"local_by_copy_engine": 3},
    {"max_window_bytes": -1}, {"max_window_bytes": "x"}, {"relay": "perhaps"},
]  # fmt: skip


@pytest.mark.parametrize(
    "make, wrong",
    [(module_on, wrong) for wrong in WRONG_FOR_MODULES]
    + [(layer_on, wrong) for wrong in WRONG_FOR_LAYERS],
    ids=case_name,
)
def test_modules_and_layers(make, wrong):
    said = errors_of(make, wrong)
    (name,) = wrong
    assert "rank 1" in said[0] and name in said[0], said
    assert "rank 1 with" not in said[1] and name in said[1], said


@pytest.mark.parametrize(
    "make, who, wrong",
    [(buffer_on, "Buffer", wrong) for wrong in WRONG_FOR_BUFFERS]
    + [(dispatcher_on, "SequenceDispatcher", wrong) for wrong in WRONG_FOR_DISPATCHERS],
    ids=case_name,
)
def test_buffers_and_dispatchers(make, who, wrong):
    said = errors_of(make, wrong)
    (name,) = wrong
    assert f"{who}: rank 1 with arguments = wrong" in said[0] and name in said[0], said
    assert said[1].startswith(f"{who}: {name}"), said


@pytest.mark.parametrize("wrong", [{"num_cpu_bytes": 1}, {"num_bytes": -1}, {"hidden": "x"}])
def test_elastic_buffers(wrong):
    if "hidden" in wrong:
        wrong = {**wrong, "num_bytes": None}
    said = errors_of(elastic_on, wrong)
    assert "ElasticBuffer: rank 1 with arguments = wrong" in said[0], said


def test_links():
    said = errors_of(links_on, {"links": 3e11})
    assert "rank 1 with arguments = wrong (links is a float" in said[0], said
    assert said[1].startswith("World.use_links: links is a float"), said


@pytest.mark.parametrize(
    "other", [{"num_nvl_bytes": 1 << 21}, {"num_rdma_bytes": 5}, {"explicitly_destroy": True}]
)
def test_buffers_of_other_sizes(other):
    """What one rank refuses later, and another sends."""
    (name,) = other
    for text in errors_of(buffer_on, other):
        assert f"Buffer: rank 1 with {name} = " in text


def test_a_given_layer_of_one_rank():
    def body(world):
        layer = layer_on(world, dropped_id=-1)
        with pytest.raises(waybill.InvalidArgument, match="rank 1 with layer = made, the others g"):
            module_on(world, **({"layer": layer} if world.rank == 0 else {}))

    wt.run_threads(2, body, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("rows", [0, 64, "x"])
def test_a_resize_of_one_rank(rows):
    """The layer that is there stays."""

    def body(world):
        module = module_on(world, fixed_rows=32)
        with pytest.raises(waybill.Error, match="fixed_rows"):
            module.resize(rows if world.rank == 1 else 48)
        tokens, ids = torch.ones(3, 8).bfloat16(), torch.tensor([[0, 2]] * 3)
        assert module(tokens, torch.ones(3, 2), ids).shape == (3, 8)
        assert module.layer.fixed_rows == 32

    wt.run_threads(2, body, timeout_s=TIMEOUT_S)
