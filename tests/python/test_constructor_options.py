"""Every option of every constructor is applied or refused by name, whatever else it is given: a
World, a process group, a DeviceMesh of one dimension, or None.
"""

import contextlib
import inspect
import pathlib

import numpy as np
import pytest
from test_groups import run_group
from test_process_worlds import expect_all_well

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")
moe = pytest.importorskip("waybill.torch.moe")


def a_kernel(q, k, v, sequences, shape):
    return q


#: Of ContextParallelAttention: a value other than the default, and where it is seen.
ATTENTION = {
    "heads": (6, lambda m: m.planner.shape.heads == 6),
    "kv_heads": (1, lambda m: m.planner.shape.kv_heads == 1),
    "head_dim": (64, lambda m: m.planner.shape.head_dim == 64),
    "v_head_dim": (32, lambda m: m.planner.shape.v_head_dim == 32),
    "dtype": (torch.float32, lambda m: m.planner.shape.dtype == torch.float32),
    "mask": ("full", lambda m: m.planner.shape.mask == "full"),
    "window": (7, lambda m: m.planner.shape.window == 7),
    "scale": (0.25, lambda m: m.planner.shape.scale == 0.25),
    "kernel": (a_kernel, lambda m: m.kernel.function is a_kernel),
    "in_place": (False, lambda m: m.planner.in_place is False),
    "block_tokens": (64, lambda m: m.planner.facts()["block_tokens"] == 64),
    "imbalance_target": (1.2, lambda m: m.planner.facts()["imbalance_target"] == 1.2),
    "costs": (waybill.AttentionCosts(1e9, 300), lambda m: m.planner.facts()["row_pairs"] == 300),
    "latent_dim": (16, lambda m: m.planner.latent_dim == 16),
    "chunk": (16, lambda m: m.planner.chunk == 16),
    "relay": ("never", lambda m: m.planner.relay == "never"),
    "overlap": (False, lambda m: not m._side.overlaps),
    "num_sms": (4, lambda m: m._dispatcher.num_sms == 4),
    "device": ("cpu", lambda m: m.world.device == "cpu"),
    "timeout_s": (23.0, lambda m: m.world.timeout_s == 23.0),
}
WRONG = {
    "heads": 0, "kv_heads": 0, "head_dim": 0, "v_head_dim": 0, "dtype": "int32", "mask": "no",
    "window": 0, "scale": -1.0, "kernel": "no", "in_place": "no", "block_tokens": 0,
    "imbalance_target": "no", "costs": 1, "latent_dim": 0, "chunk": 0, "relay": "no",
    "overlap": "no", "num_sms": -1, "device": "tpu", "timeout_s": "no",
}  # fmt: skip


def refused(call, name, who):
    """Whether a call is refused in the words of its caller, at the argument of this name."""
    try:
        call()
    except waybill.Error as error:
        assert str(error).startswith(f"{who}: {name} "), error
        return True
    return False


def check_attention(group):
    """Every option beside this first argument: applied, or refused. Collective. Returns those that
    were refused with a value that is good elsewhere.
    """
    kind = wt.ContextParallelAttention
    assert [*inspect.signature(kind).parameters] == ["group", *ATTENTION] and ATTENTION.keys() == (
        WRONG.keys()
    )
    not_applied = []
    for name, (value, is_seen) in ATTENTION.items():

        def make(name=name, value=value):
            return kind(group, **{"heads": 2, name: value})

        made = []
        if refused(lambda: made.append(make()), name, kind.__name__):  # noqa: B023
            not_applied.append(name)
        else:
            assert is_seen(made[0]), name
        wrong = WRONG[name]
        assert refused(lambda: make(value=wrong), name, kind.__name__), name  # noqa: B023
    return not_applied


def test_attention_on_a_world():
    """A World has its deadline; another one was ignored, and calls waited for 60 seconds."""

    def body(world):
        assert check_attention(world) == ["timeout_s"]
        for its in (None, world.timeout_s):
            made = wt.ContextParallelAttention(world, 2, timeout_s=its)
            assert made.world is world
        with pytest.raises(waybill.InvalidArgument) as error:
            wt.ContextParallelAttention(world, 2, timeout_s=5)
        said = "ContextParallelAttention: timeout_s = 5, expected 20, that of the World"
        assert str(error.value) == said
        with pytest.raises(waybill.InvalidArgument, match="timeout_s = 5"):  # all hear of one
            wt.ContextParallelAttention(world, 2, timeout_s=5 if world.rank else None)

    wt.run_threads(2, body, timeout_s=20)


@pytest.mark.xdist_group("processes")
def test_attention_and_worlds_on_groups(tmp_path):
    here = pathlib.Path(__file__).parent
    program = f"""
    sys.path.insert(0, "{here}")
    import test_constructor_options as options

    mesh = distributed.device_mesh.init_device_mesh("cpu", (W,), mesh_dim_names=("cp",))
    for group in (None, distributed.group.WORLD, mesh["cp"]):
        assert options.check_attention(group) == []
        options.check_world_of_group(group)
    options.check_group_that_is_there()
"""
    expect_all_well(run_group(tmp_path, program, 2))


def check_world_of_group(group):
    make = waybill.World.from_process_group
    world = make(group, device="cpu", nvshmem=False, ranks_per_node=1, timeout_s=23)
    assert (world.device, world.timeout_s, world.topology.ranks_per_node) == ("cpu", 23, 1)
    for name, value in WRONG_OF_WORLDS.items():
        assert refused(lambda: make(group, **{name: value}), name, make.__qualname__)  # noqa: B023
    for kind in (waybill.SequenceDispatcher, wt.SequenceDispatcher):
        assert refused(lambda: kind(group, num_sms=4), "world", "SequenceDispatcher")  # noqa: B023


def check_group_that_is_there():
    """Of a process group that exists nothing can be changed."""
    start, same = wt.initialize_distributed, (torch.distributed.get_rank(), 2)
    assert start() == start("gloo") == start(device="cpu") == same
    assert start("cpu:gloo,cuda:gloo") == start(timeout_s=1800) == same  # torch's default
    for name, value in (("backend", "nccl"), ("timeout_s", 5), ("timeout_s", "no")):
        assert refused(lambda: start(**{name: value}), name, "initialize_distributed")  # noqa: B023


WRONG_OF_WORLDS = {"device": "tpu", "nvshmem": "no", "ranks_per_node": 3, "timeout_s": -1}


def test_worlds(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    factory = waybill.World
    makers = {
        factory.from_environment: {},
        lambda **o: factory.from_all_gather(0, 1, lambda mine: [mine], **o): {"ranks_per_node": 1},
    }
    whos = ("World.from_environment", "World.from_all_gather")
    for who, (make, more) in zip(whos, makers.items()):
        world = make(device="cpu", nvshmem=False, timeout_s=23, **more)
        assert (world.device, world.timeout_s) == ("cpu", 23)
        for name, value in WRONG_OF_WORLDS.items():
            if name != "ranks_per_node" or more:
                assert refused(lambda: make(**{**more, name: value}), name, who)  # noqa: B023
    for name, value in {"rank": 1, "world_size": 0, "all_gather": 3}.items():
        given = {"rank": 0, "world_size": 1, "all_gather": lambda mine: [mine], name: value}
        name = "rank" if name == "world_size" else name  # said of both
        assert refused(lambda: factory.from_all_gather(**given), name, whos[1])  # noqa: B023


@pytest.mark.parametrize("face", [waybill, wt], ids=["numpy", "torch"])
def test_run_threads(face):
    seen = face.run_threads(
        4, lambda w: (w.device, w.topology.ranks_per_node, w.timeout_s),
        device="cpu", ranks_per_node=2, timeout_s=23,
    )  # fmt: skip
    assert seen == [("cpu", 2, 23)] * 4
    wrong = {"device": "tpu", "ranks_per_node": 3, "timeout_s": 0, "world_size": 0, "body": 5}
    for name, value in wrong.items():
        given = {"world_size": 4, "body": lambda w: None, name: value}
        assert refused(lambda: face.run_threads(**given), name, "run_threads")  # noqa: B023


RELAYED = waybill.plan([4000, 40, 40, 40], 4, 0, block_tokens=4).to_routing()


@pytest.mark.parametrize("face", [waybill, wt], ids=["numpy", "torch"])
def test_dispatchers(face):
    rows = np.ones((5000, 8), np.float32) if face is waybill else torch.ones(5000, 8)
    names = ["world", "num_sms", "chunk_bytes", "local_by_copy_engine", "max_window_bytes", "relay"]
    assert [*inspect.signature(face.SequenceDispatcher).parameters] == names
    wrong = dict(zip(names, ("a rank", -1, 17, "no", -1, "no")))

    def body(world):
        kind, who = face.SequenceDispatcher, "SequenceDispatcher"
        assert kind(world, num_sms=4).num_sms == 4
        with pytest.raises(waybill.InvalidArgument, match="at most max_window_bytes = 4096"):
            small = kind(world, max_window_bytes=4096)
            small.dispatch(small.plan_dispatch((RELAYED.fwd_kv, rows)), rows)
        ways = {
            relay: kind(world, relay=relay).plan_dispatch((RELAYED.fwd_kv, rows)).way
            for relay in ("never", "always")
        }
        assert ways == {"never": "direct", "always": "relay"}
        for name, value in wrong.items():
            given = {"world": world, "chunk_bytes": 4096, "local_by_copy_engine": 0, name: value}
            assert refused(lambda: kind(**given), name, who), name  # noqa: B023
        for other in (None, world._world, 3):
            assert refused(lambda: kind(other, num_sms=4), "world", who)  # noqa: B023

    face.run_threads(4, body, timeout_s=20)


def test_relays_by_copy_engines(torch_way):
    """On GPUs they forward nothing: ``always`` was taken for ``never``. CPUs have none."""
    rows = torch.ones(5000, 8, device="cpu")

    def body(world):
        def way(relay):
            dispatcher = wt.SequenceDispatcher(world, num_sms=0, relay=relay)
            return dispatcher.plan_dispatch((RELAYED.fwd_kv, rows.to(world.device))).way

        if world.device == "cpu":
            assert way("always") == "relay"
        else:
            assert refused(lambda: way("always"), "relay", "SequenceDispatcher")
        assert way("never") == "direct"

    torch_way.run(4, body)


LENGTHS = [3000, 200, 1700, 900, 40, 5000, 77, 300]
#: Of ``waybill.plan``: each changes the plan, its figures, or what it may be.
PLAN = {
    "world_size": 2, "tokens_per_rank": 2900, "q_hidden": 8192, "kv_hidden": 8192,
    "dtype": "float32", "mask": "full", "window": 100, "max_tokens_per_rank": 3500, "relay": False,
    "kv_layout": "per_query", "imbalance_target": 1.2, "byte_weight": 1.0, "block_tokens": 256,
    "ranks_per_node": 2, "nvlink_bytes_per_second": 1e10, "network_bytes_per_second": 1e9,
    "message_seconds": 1e-3, "pairs_per_second": 1e9, "tails": True,
    "costs": waybill.AttentionCosts(1e9, row_pairs=300, shard_pairs=3000), "chunk": 600,
    "prefix": 150,
}  # fmt: skip


@pytest.mark.parametrize("are_lists", [False, True])
def test_plans(are_lists):
    lengths = [LENGTHS[i : i + 2] for i in range(0, 8, 2)] if are_lists else LENGTHS
    given = {"world_size": 4, "tokens_per_rank": 0 if not are_lists else 5100}
    assert [*inspect.signature(waybill.plan).parameters][1:] == sorted(
        PLAN, key=[*inspect.signature(waybill.plan).parameters].index
    )

    def made(**options):
        return waybill.plan(lengths, **{**given, **options}).to_json(compact=True)

    # An upper limit that only lists of documents have: no rows are moved between homes.
    only_limits = {"tokens_per_rank", "ranks_per_node"} if are_lists else set()
    for name, value in PLAN.items():
        with contextlib.suppress(waybill.InvalidArgument):
            assert made(**{name: value}) != made() or name in only_limits, name
    with pytest.raises(waybill.InvalidArgument, match=r"byte_weight = 1 needs .*pairs_per_second"):
        made(byte_weight=1.0)
    assert made(byte_weight=1e9, pairs_per_second=1e9) != made(pairs_per_second=1e9)
    costs = waybill.AttentionCosts(1e9, row_pairs=300)
    assert made(costs=costs, pairs_per_second=5e8) != made(costs=costs)  # the argument comes first
    assert made(mask="prefix", prefix=150) != made(mask="prefix", prefix=90)


def test_batch_planners():
    for name, (value, is_seen) in ATTENTION.items():
        if name in inspect.signature(wt.BatchPlanner).parameters:
            made = wt.BatchPlanner(4, **{"heads": 2, name: value})
            assert is_seen(type("Module", (), {"planner": made})), name
            assert refused(
                lambda: wt.BatchPlanner(4, **{"heads": 2, name: WRONG[name]}),  # noqa: B023
                name, "BatchPlanner",
            )  # fmt: skip


@pytest.mark.parametrize("face", [waybill, moe], ids=["numpy", "torch"])
def test_options_of_copies_without_copies(face):
    """They were accepted and had no effect."""
    dtype = "float32" if face is waybill else torch.float32

    def body(world):
        def layer(**options):
            return face.EPAll2AllLayer(world, 4, 16, 1, 0, 4, 1, 1, dtype, **options)

        for name, value in {"limit": 1.5, "min_rows": 7}.items():
            assert refused(lambda: layer(**{name: value}), name, "EPAll2AllLayer"), name  # noqa: B023
            assert getattr(layer(spare_experts=2, **{name: value}), name) == value
        assert layer(spare_experts=0, limit=1, min_rows=0).limit == 1.0  # the defaults
        with pytest.raises(waybill.InvalidArgument) as error:
            layer(limit=1.5)
        wanted = "limit = 1.5, expected spare_experts > 0 with it, or 1.0"
        assert str(error.value) == f"EPAll2AllLayer: {wanted}"

    waybill.run_threads(1, body)


def test_options_of_copies_of_modules():
    """Those of a layer that was given, which plans the copies, had no effect either."""

    def body(world):
        def module(**options):
            return moe.ExpertParallel(
                moe.SwiGLUExperts(4, 16, 16, torch.float32), num_experts=4, topk=1, hidden=16,
                max_tokens=4, gradients="sum",
                **{"group": world, "dtype": torch.float32, **options},
            )  # fmt: skip

        who, of_copies = "ExpertParallel", {"limit": 1.5, "min_rows": 7, "keep_copies": True}
        for name, value in {**of_copies, "min_rows": "pays"}.items():
            assert refused(lambda: module(**{name: value}), name, who), name  # noqa: B023
        module(limit=1.02, min_rows=128, keep_copies=False)
        assert module(spare_experts=1, limit=1.5, min_rows=7).layer.min_rows == 7
        layer = moe.EPAll2AllLayer(
            world, 4, 16, 1, 0, 4, 1, 1, torch.float32, dropped_id=-1, spare_experts=1, min_rows=7
        )
        its = {"layer": layer, "spare_experts": 1, "dtype": None, "group": None}
        assert module(min_rows=7, limit=1.0, **its).layer is module(**its).layer is layer
        for name, value in {"limit": 1.5, "min_rows": 8}.items():
            assert refused(lambda: module(**its, **{name: value}), name, who), name  # noqa: B023

    waybill.run_threads(1, body)


def test_options_of_copies_of_adapters():
    """Without copies the adapters' experts ended with an error of Python."""
    from waybill.integrations._shared import CopiedExperts

    experts = moe.SwiGLUExperts(4, 16, 16, torch.float32)
    none = {"spare_experts": 0}
    assert refused(lambda: CopiedExperts(experts, none, "who"), "spare_experts", "who")
    assert CopiedExperts(experts, {"limit": 1.5}, "who").plan == (1, 1.5, 128)


@pytest.mark.parametrize(("kind", "name", "hint"), [
    (wt.ContextParallelAttention, "num_heads", "did you mean heads?"),
    (wt.ContextParallelAttention, "causal", "did you mean mask?"),
    (wt.ContextParallelAttention, "softmax_scale", "did you mean scale?"),
    (moe.ExpertParallel, "n_experts", "did you mean num_experts?"),
    (moe.ExpertParallel, "fixed_row", "did you mean fixed_rows?"),
    (moe.ExpertParallel, "top_k", "did you mean topk?"),
    (moe.EPAll2AllLayer, "n_experts", "did you mean num_tot_experts?"),
    (waybill.EPAll2AllLayer, "max_token", "did you mean max_tokens?"),
    (waybill.EPAll2AllLayer, "causal", "expected one of capacity, combine, copy_out, "),
])  # fmt: skip
def test_unknown_keywords(kind, name, hint):
    """Also where arguments are missing, which Python says first."""
    for more in ({}, {"hidden": 16}):
        if "hidden" in inspect.signature(kind).parameters or not more:
            with pytest.raises(TypeError) as error:
                kind(None, **more, **{name: 3})
            said = f"{kind.__name__}: there is no argument {name}, {hint}"
            assert str(error.value).startswith(said) and isinstance(
                error.value, waybill.InvalidArgument
            )


def test_missing_arguments_are_as_ever():
    for kind in (wt.ContextParallelAttention, moe.ExpertParallel, moe.EPAll2AllLayer):
        with pytest.raises(TypeError, match=r"__init__\(\) missing .* required"):
            kind(None)
        assert "self" not in inspect.signature(kind).parameters
