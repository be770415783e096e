"""Every option of the constructors of experts' layers is applied or refused, whatever else is
given. The tables name all of them; they are tried here, or in the file that stands there.
"""

import inspect
import pathlib

import pytest

torch = pytest.importorskip("torch")

import waybill  # noqa: E402
import waybill.torch as wt  # noqa: E402
from waybill.integrations.deep_ep import Buffer, ElasticBuffer  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer, ExpertParallel, SwiGLUExperts  # noqa: E402

HIDDEN, EXPERTS, TOPK, MOST = 8, 2, 2, 6
SIZES = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": MOST}
FIXED = {"fixed_rows": TOPK * MOST}


def identity(rows, *_):
    return rows


def layer_on(world, **options):
    given = {
        "ep_group": world, "max_tokens": MOST, "hidden": HIDDEN, "topk": TOPK, "rank": 0,
        "num_tot_experts": EXPERTS, "local_world_size": 1, "world_size": 1,
        "dtype": torch.float32, **options,
    }  # fmt: skip
    return EPAll2AllLayer(**given)


def module_on(world, **options):
    given = {"group": world, "dtype": torch.float32, "gradients": "sum", **SIZES, **options}
    return ExpertParallel(given.pop("experts", identity), **given)


def in_given_layer(world, **options):
    layer = layer_on(world, dropped_id=-1, **options.pop("of_layer", {}))
    given = {"gradients": "sum", **SIZES, **options}
    return ExpertParallel(identity, layer=layer, **given)


def buffer_on(world, **options):
    given = {"group": world, "num_nvl_bytes": 2**16, "num_rdma_bytes": 2**16, **options}
    return Buffer(**given)


def elastic_on(world, **options):
    return ElasticBuffer(**{"group": world, "num_bytes": 2**16, **options})


def experts_on(world, **options):
    return SwiGLUExperts(**{"num_experts": 1, "hidden": 8, "inner": 16, **options})


# (make, options, the error's name, what is said)
REFUSED = [
    (layer_on, {**FIXED, "capacity": 2}, "InvalidArgument", "capacity = 2, expected none"),
    (layer_on, {"ep_group": 5}, "InvalidArgument", "ep_group is 5, expected"),
    (layer_on, {"capacity": 0}, "InvalidArgument", "capacity"),
    (layer_on, {"max_per_expert": 0}, "InvalidArgument", "max_per_expert = 0"),
    (
        layer_on,
        {"combine": "push"},
        "InvalidArgument",
        'combines pull since 0.2, .* goes in 0.3: combine = "push", expected "pull"$',
    ),
    (layer_on, {"combine": True}, "WrongType", 'combine = True, expected "pull"'),
    (layer_on, {"device": "cuda"}, "InvalidArgument", "device = 'cuda', expected cpu"),
    (layer_on, {"rank": 1, "world_size": 2}, "InvalidArgument", "world_size|rank"),
    (module_on, {"device": "cuda"}, "InvalidArgument", "device = 'cuda', expected cpu"),
    (module_on, {**FIXED, "capacity": 3}, "InvalidArgument", "capacity = 3, expected none"),
    (module_on, {"preset": "decoding", "capacity": 3}, "InvalidArgument", "capacity = 3"),
    (
        module_on,
        {**FIXED, "operations": True, "windows": "own"},
        "InvalidArgument",
        'windows = "own" with operations = True',
    ),
    (
        module_on,
        {**FIXED, "operations": True, "copy_out": False},
        "InvalidArgument",
        "copy_out = False with operations = True",
    ),
    (in_given_layer, {"group": "other"}, "InvalidArgument", "group"),
    (in_given_layer, {"device": "cuda"}, "InvalidArgument", "device = 'cuda', expected"),
    (in_given_layer, {"dtype": "bfloat16"}, "InvalidArgument", "dtype = 'bfloat16', expected"),
    (in_given_layer, {"weight_dtype": "bfloat16"}, "InvalidArgument", "weight_dtype = 'bfloat16'"),
    (in_given_layer, {"preset": "training"}, "InvalidArgument", "preset are those of the layer"),
    (in_given_layer, {"num_sm": 4}, "InvalidArgument", "num_sm are those of the layer"),
    (in_given_layer, {"max_tokens": MOST + 1}, "InvalidArgument", "at least 7"),
    (experts_on, {"num_experts": 0}, "InvalidArgument", "num_experts = 0, expected >= 1"),
    (experts_on, {"hidden": "8"}, "InvalidArgument", "hidden = '8', expected"),
    (experts_on, {"inner": -1}, "InvalidArgument", "inner = -1, expected >= 1"),
    (experts_on, {"dtype": torch.int32}, "InvalidArgument", "dtype = torch.int32, expected floats"),
    (experts_on, {"device": 1.5}, "InvalidArgument", "device = 1.5, expected a device"),
    (buffer_on, {"num_nvl_bytes": -1}, "InvalidArgument", "num_nvl_bytes = -1"),
    (buffer_on, {"num_rdma_bytes": -1}, "InvalidArgument", "num_rdma_bytes = -1"),
    (buffer_on, {"low_latency_mode": 2}, "InvalidArgument", "low_latency_mode = 2"),
    (buffer_on, {"num_qps_per_rank": 0}, "InvalidArgument", "num_qps_per_rank = 0"),
    (
        buffer_on,
        {"allow_nvlink_for_low_latency_mode": False},
        "Unsupported",
        "allow_nvlink_for_low_latency_mode = False",
    ),
    (buffer_on, {"allow_mnnvl": "yes"}, "InvalidArgument", "allow_mnnvl = 'yes'"),
    (buffer_on, {"explicitly_destroy": 3}, "InvalidArgument", "explicitly_destroy = 3"),
    (buffer_on, {"enable_shrink": True}, "Unsupported", "enable_shrink = True"),
    (buffer_on, {"comm": object()}, "Unsupported", "comm"),
    (buffer_on, {"use_fabric": True}, "Unsupported", "use_fabric = True"),
    (buffer_on, {"group": 5}, "InvalidArgument", "group is 5, expected"),
    (elastic_on, {"group": 5}, "InvalidArgument", "group is 5, expected"),
    (elastic_on, {"num_bytes": -1}, "InvalidArgument", "num_bytes = -1"),
    (elastic_on, {"num_cpu_bytes": 1}, "Unsupported", "num_cpu_bytes = 1"),
    (elastic_on, {"num_max_tokens_per_rank": -1}, "InvalidArgument", "num_max_tokens_per_rank"),
    (elastic_on, {"hidden": "x"}, "InvalidArgument", "hidden = 'x'"),
    (elastic_on, {"num_topk": -2}, "InvalidArgument", "num_topk = -2"),
    (elastic_on, {"use_fp8_dispatch": 2}, "InvalidArgument", "use_fp8_dispatch = 2"),
    (elastic_on, {"deterministic": "x"}, "InvalidArgument", "deterministic = 'x'"),
    (elastic_on, {"allow_hybrid_mode": 2}, "InvalidArgument", "allow_hybrid_mode = 2"),
    (elastic_on, {"allow_multiple_reduction": 2}, "InvalidArgument", "allow_multiple_reduction"),
    (elastic_on, {"prefer_overlap_with_compute": 2}, "InvalidArgument", "prefer_overlap_with_c"),
    (elastic_on, {"sl_idx": -1}, "InvalidArgument", "sl_idx = -1"),
    (elastic_on, {"num_allocated_qps": -1}, "InvalidArgument", "num_allocated_qps = -1"),
    (elastic_on, {"num_cpu_timeout_secs": 10}, "Unsupported", "num_cpu_timeout_secs = 10"),
    (elastic_on, {"num_gpu_timeout_secs": 10}, "Unsupported", "num_gpu_timeout_secs = 10"),
    (elastic_on, {"num_gpu_timeout_secs": 0}, "InvalidArgument", "num_gpu_timeout_secs = 0"),
    (elastic_on, {"explicitly_destroy": 3}, "InvalidArgument", "explicitly_destroy = 3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    REFUSED,
    ids=[f"{make.__name__} {' '.join(options)}" for make, options, *_ in REFUSED],
)
def test_refused(make, options, error, text):
    def body(world):
        given = {**options}
        if given.get("group") == "other":
            given["group"] = wt.run_threads(1, identity)[0]
        with pytest.raises(getattr(waybill, error), match=text):
            make(world, **given)

    wt.run_threads(1, body)


def call(module, count):
    ids = torch.tensor([[0, 1]] * count)
    return module(torch.ones(count, HIDDEN), torch.ones(count, TOPK), ids)


def test_the_sizes_beside_a_given_layer():
    """max_tokens and chunks are the module's own, also where the layer has room for more."""

    def body(world):
        module = in_given_layer(world, max_tokens=3)
        assert call(module, 3).shape == (3, HIDDEN)
        with pytest.raises(waybill.InvalidArgument, match=r"tokens are 4, .* max_tokens = 3"):
            call(module, 4)
        seen = []
        made = layer_on(world, dropped_id=-1)

        def experts(rows, ends):
            seen.append(len(rows))
            return rows

        parts = ExpertParallel(experts, layer=made, chunks=3, gradients="sum", **SIZES)
        assert torch.equal(call(parts, MOST), torch.full((MOST, HIDDEN), 2.0))
        assert seen == [4, 4, 4]

    wt.run_threads(1, body)


def test_a_resize_of_a_layer_that_grew():
    def body(world):
        module = module_on(world, capacity=3)
        assert module.layer.output_rows == 3 * MOST * TOPK
        module.resize(2 * MOST)
        assert module.layer.output_rows == module.layer.fixed_rows == 2 * MOST
        assert call(module, MOST).shape == (MOST, HIDDEN)

    wt.run_threads(1, body)


def test_a_device_and_a_group_that_are_the_layers():
    def body(world):
        layer = layer_on(world, dropped_id=-1)
        for options in ({}, {"group": world}, {"device": "cpu", "group": world}):
            module = ExpertParallel(identity, layer=layer, gradients="sum", **SIZES, **options)
            assert call(module, 2).shape == (2, HIDDEN)

    wt.run_threads(1, body)


def test_low_latency_calls_need_their_mode():
    def body(world):
        x, ids = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2)
        buffer = buffer_on(world)
        with pytest.raises(waybill.InvalidArgument, match="made with low_latency_mode = False"):
            buffer.low_latency_dispatch(x, ids, 4, EXPERTS)
        buffer_on(world, low_latency_mode=True).low_latency_dispatch(x, ids, 4, EXPERTS)

    wt.run_threads(1, body)


# Options of which every value has an effect that a test sees: it is named here.
SEEN = {
    ExpertParallel: {
        "experts": "test_expert_words.py", "shared": "test_expert_words.py",
        "num_experts": "test_expert_words.py", "topk": "test_expert_words.py",
        "hidden": "test_expert_words.py", "gradients": "test_expert_parallel.py",
        "weights": "test_expert_dtypes.py", "chunks": "test_expert_parallel.py",
        "operations": "test_expert_operations.py", "layer": "test_expert_options.py",
        "layer_options": "test_expert_options.py",
        "spare_experts": "test_expert_parallel_copies.py",
        "limit": "test_expert_parallel_copies.py", "min_rows": "test_expert_parallel_copies.py",
        "keep_copies": "test_expert_parallel_copies.py",
    },
    EPAll2AllLayer: {
        "max_tokens": "test_torch_moe.py",
        "hidden": "test_expert_words.py", "topk": "test_made_together.py",
        "num_tot_experts": "test_expert_words.py", "local_world_size": "test_made_together.py",
        "dtype": "test_torch_moe_float64.py", "weight_dtype": "test_torch_moe_float64.py",
        "num_sm": "test_expert_training.py", "enable_local_combine": "test_torch_moe.py",
        "use_aot": "test_torch_moe.py", "dropped_id": "test_expert_words.py",
        "rows": "test_torch_moe.py", "payload": "test_torch_moe.py",
        "fixed_rows": "test_expert_flight.py", "copy_out": "test_torch_moe.py",
        "expert_alignment": "test_torch_moe.py", "combine": "test_expert_options.py",
        "scale_layout": "test_payload_formats.py",
        "spare_experts": "test_torch_moe_spare.py", "limit": "test_torch_moe_spare.py",
        "min_rows": "test_torch_moe_spare.py",
    },
    SwiGLUExperts: {}, Buffer: {}, ElasticBuffer: {},
}  # fmt: skip
MAKERS = {
    ExpertParallel: (module_on, in_given_layer), EPAll2AllLayer: (layer_on,),
    SwiGLUExperts: (experts_on,), Buffer: (buffer_on,), ElasticBuffer: (elastic_on,),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEEN, ids=lambda kind: kind.__name__)
def test_no_option_is_forgotten(kind):
    tried = {name for make, options, *_ in REFUSED if make in MAKERS[kind] for name in options}
    assert set(inspect.signature(kind).parameters) - tried - set(SEEN[kind]) == set()
    for name, file in SEEN[kind].items():
        assert name in (pathlib.Path(__file__).parent / file).read_text(), (name, file)
