"""The DeepEP interface and odd values: an error of ours that names the argument, before any
communication, or a result; and ranks that do not say the same.
"""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

import waybill
from waybill.integrations.deep_ep import Buffer, Config, ElasticBuffer, EventOverlap

WORLD, HIDDEN, EXPERTS, TOPK, MOST = 2, 128, 4, 2, 6
COUNT = 5
ODD = [
    5, -1, 1.5, "a", [], [1], {}, object(), float("nan"), 2**70, (1, 2), (None, None),
    torch.ones(COUNT, TOPK, device="meta"), torch.ones(COUNT, HIDDEN, device="meta").bfloat16(),
    torch.ones(COUNT, TOPK).to_sparse(), torch.ones(COUNT, TOPK + 1), torch.ones(3),
    torch.ones(COUNT, 4, dtype=torch.bool), torch.ones(2, 2, 2), torch.tensor(3.0),
]  # fmt: skip


def new(world):
    return Buffer(world, 2**20, 2**20, low_latency_mode=True)


def choices():
    return torch.tensor([[0, 3], [1, 2], [0, -1], [-1, -1], [3, 2]])


def rows(world):
    draws = torch.Generator().manual_seed(world.rank)
    return torch.randn(COUNT, HIDDEN, generator=draws).bfloat16()


def given(world, buffer, count=COUNT, experts=EXPERTS, **other):
    ids = choices()[:count]
    tokens, _, each, inside, _ = buffer.get_dispatch_layout(ids, experts)
    return {
        "x": rows(world)[:count], "num_tokens_per_rank": tokens, "is_token_in_rank": inside,
        "num_tokens_per_expert": each, "topk_idx": ids, "topk_weights": torch.ones(count, TOPK),
        **other,
    }  # fmt: skip


def layout(world, buffer):
    return buffer.get_dispatch_layout, {"topk_idx": choices(), "num_experts": EXPERTS}


def dispatch(world, buffer):
    return buffer.dispatch, {**given(world, buffer), "config": Config(), "handle": None}


def combine(world, buffer):
    got = buffer.dispatch(**given(world, buffer))
    arguments = {"x": got[0], "handle": got[4], "topk_weights": got[2], "bias": rows(world)}
    return buffer.combine, {**arguments, "config": Config()}


def few(world, buffer):
    stats = torch.zeros(EXPERTS // WORLD, dtype=torch.int32)
    return buffer.low_latency_dispatch, {
        "x": rows(world), "topk_idx": choices(), "num_max_dispatch_tokens_per_rank": MOST,
        "num_experts": EXPERTS, "cumulative_local_expert_recv_stats": stats, "use_fp8": False,
    }  # fmt: skip


def few_home(world, buffer):
    call, arguments = few(world, buffer)
    got = call(**arguments)
    out = torch.empty(COUNT, HIDDEN, dtype=torch.bfloat16)
    return buffer.low_latency_combine, {
        "x": got[0], "topk_idx": choices(), "topk_weights": torch.ones(COUNT, TOPK),
        "handle": got[2], "zero_copy": False, "out": out,
    }  # fmt: skip


def elastic(world, buffer, **other):
    buffer = ElasticBuffer(world, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
    stats = torch.zeros(EXPERTS // WORLD, dtype=torch.int32)
    return buffer.dispatch, {
        "x": rows(world), "topk_idx": choices(), "topk_weights": torch.ones(COUNT, TOPK),
        "cumulative_local_expert_recv_stats": stats, "num_experts": EXPERTS, "handle": None,
        "previous_event_before_epilogue": None, "do_expand": False, "do_cpu_sync": True, **other,
    }  # fmt: skip


def again(world, buffer):
    call, arguments = elastic(world, buffer)
    got = call(**arguments)
    return call, {"x": rows(world), "handle": got[3], "topk_weights": torch.ones(COUNT, TOPK)}


def expanded_again(world, buffer):
    call, arguments = elastic(world, buffer, do_expand=True)
    got = call(**arguments)
    return call, {"x": rows(world), "handle": got[3], "topk_weights": torch.ones(COUNT, TOPK)}


def elastic_home(world, buffer):
    call, arguments = elastic(world, buffer)
    got = call(**arguments)
    return call.__self__.combine, {
        "x": got[0], "handle": got[3], "topk_weights": got[2], "bias": rows(world),
        "previous_event_before_epilogue": None,
    }  # fmt: skip


CALLS = [
    layout, dispatch, combine, few, few_home, elastic, again, expanded_again, elastic_home
]  # fmt: skip
#: No odd values for these arguments.
WELCOME = {"num_max_dispatch_tokens_per_rank": "5", "bias": "[]"}


@pytest.mark.parametrize("make", CALLS, ids=[make.__name__ for make in CALLS])
def test_odd_values(make):
    def body(world):
        call, arguments = make(world, new(world))
        if world.rank == 1:  # the other does not hear of it
            for name in [*arguments, "previous_event"][: -1 if make in (few, few_home) else None]:
                for odd in ODD:
                    if str(odd) == WELCOME.get(name):
                        continue
                    with pytest.raises(waybill.Error) as error:
                        call(**{**arguments, name: odd})
                    assert isinstance(error.value, waybill.InvalidArgument), (name, odd)
                    assert name in str(error.value) or "num_tokens" in str(error.value), (name, odd)
        call(**arguments)  # ranks are in step

    waybill.run_threads(WORLD, body, timeout_s=10.0)


@pytest.mark.parametrize("name", ["num_max_tokens_per_rank", "hidden", "num_bytes"])
def test_sizes_of_an_elastic_buffer(name):
    def body(world):
        sizes = {"num_bytes": None, "num_max_tokens_per_rank": MOST, "hidden": HIDDEN}
        for odd in (-1, 1.5, "a", 2**70):
            with pytest.raises(waybill.InvalidArgument, match=f"^ElasticBuffer: {name} = "):
                ElasticBuffer(world, **{**sizes, name: odd})
        with pytest.raises(
            waybill.InvalidArgument, match=r"low_latency_mode = 'no', expected True"
        ):
            Buffer(world, low_latency_mode="no")
        with pytest.raises(waybill.InvalidArgument, match=r"group is a NoneType, expected"):
            ElasticBuffer.get_buffer_size_hint(None, MOST, HIDDEN)

    waybill.run_threads(WORLD, body)


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ({"topk_weights": None}, {}, "topk_weights = (None|given)"),
        ({"topk_weights": None, "topk_idx": None}, {}, "num_topk = (None|2)"),
        ({"experts": 8}, {}, "num_experts = (4|8)"),
        (
            {"count": 1, "num_worst_tokens": 2},
            {"num_worst_tokens": 10},
            "num_worst_tokens = (2|10)",
        ),
        ({"num_worst_tokens": 10}, {}, "num_worst_tokens = (0|10)"),
    ],
)
def test_ranks_that_say_other_things(mine, theirs, text):
    """Before, weights of the others were zeros, and their ids those of other experts."""

    def body(world):
        buffer = new(world)
        buffer.dispatch(**given(world, buffer))  # the windows are there
        with pytest.raises(waybill.Disagreement, match=r"^Buffer.dispatch: rank . has .*" + text):
            buffer.dispatch(**given(world, buffer, **(mine if world.rank == 0 else theirs)))

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_ranks_with_other_windows():
    def body(world):
        with pytest.raises(waybill.InvalidArgument, match=r"^Buffer: rank . with num_nvl_bytes = "):
            Buffer(world, 2**20 if world.rank else 2**19, 2**20)
        buffer = Buffer(world, 2**20, 2**20, low_latency_mode=True)
        most = MOST + world.rank
        with pytest.raises(waybill.InvalidArgument, match=r"^Buffer: .*most tokens"):
            buffer.low_latency_dispatch(rows(world), choices(), most, EXPERTS)

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_an_expert_chosen_twice_by_too_many_tokens():
    """There is a place for each token, no more: rows behind were lost, and sums were others'."""

    def body(world):
        buffer, twice = new(world), torch.zeros(MOST, TOPK, dtype=torch.int64)
        x = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16)
        words = "has expert 0 12 times, expected at most 6"
        one_more = torch.tensor([0, 1]).repeat(MOST, 1)
        one_more[0, 1] = 0
        if world.rank == 1:
            with pytest.raises(waybill.InvalidArgument, match=words):
                buffer.low_latency_dispatch(x, twice, MOST, EXPERTS)
            with pytest.raises(waybill.InvalidArgument, match=words.replace("12", "7")):
                buffer.low_latency_dispatch(x, one_more, MOST, EXPERTS)
        flexible = ElasticBuffer(world, num_max_tokens_per_rank=MOST, hidden=HIDDEN)
        with pytest.raises(waybill.InvalidArgument, match=words):
            flexible.dispatch(x, twice, num_experts=EXPERTS, do_expand=True)
        half = twice[: MOST // 2]  # as many rows as there are places for
        got = buffer.low_latency_dispatch(x[: MOST // 2], half, MOST, EXPERTS, use_fp8=False)
        sums, _, _ = buffer.low_latency_combine(got[0], half, torch.ones(half.shape), got[2])
        assert torch.equal(sums, 2 * x[: MOST // 2])

    waybill.run_threads(WORLD, body, timeout_s=10.0)


ON_A_GPU = """
import torch, waybill
from waybill.integrations.deep_ep import Buffer

def body(world):
    buffer = Buffer(world, 2**20, 2**20, low_latency_mode=True)
    x = torch.ones(6, 128, dtype=torch.bfloat16, device=world.device)
    ids = torch.ones(6, 2, dtype=torch.int64, device=world.device)
    for count in (3, 6):  # as many rows as there are places for, and too many
        mine = ids[:count]
        got = buffer.low_latency_dispatch(x[:count], mine, 6, 4, use_fp8=False)
        weights = torch.ones(count, 2, device=world.device)
        sums, _, _ = buffer.low_latency_combine(got[0], mine, weights, got[2])
        print(count, sums.float().mean().item(), flush=True)

waybill.run_threads(1, body, device="cuda")
"""


@pytest.mark.skipif(waybill.num_gpus() == 0, reason="needs a GPU")
def test_an_expert_chosen_twice_by_too_many_tokens_on_a_gpu():
    """The device finds it, and is lost."""
    ran = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout == "3 2.0\n" and ran.returncode != 0, ran
    assert "hold expert 1 more than max_per_expert = 6 times" in ran.stderr, ran.stderr


def test_a_layout_of_other_ids():
    """What it leaves out would not arrive, and nobody would know."""

    def body(world):
        buffer = new(world)
        arguments = given(world, buffer)
        stale = arguments["is_token_in_rank"].flip(0)
        text = (
            rf"is_token_in_rank\[0, 0\] of rank {world.rank} is False, expected True, as topk_idx"
        )
        with pytest.raises(waybill.InvalidArgument, match=text):
            buffer.dispatch(**{**arguments, "is_token_in_rank": stale & False})
        with pytest.raises(waybill.InvalidArgument, match=r"it is of another get_dispatch_layout"):
            buffer.dispatch(**{**arguments, "is_token_in_rank": stale})
        everywhere = stale | True  # more ranks than needed are the caller's choice
        assert len(buffer.dispatch(**{**arguments, "is_token_in_rank": everywhere})[0]) == 2 * COUNT

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_what_a_handle_remembers():
    """The caller's tensors may change; a combine with other ids than the dispatch's is refused."""

    def body(world):
        buffer = new(world)
        arguments = given(world, buffer)
        got = buffer.dispatch(**arguments)
        before = [entry.clone() for entry in got[4]]
        other = buffer.dispatch(**given(world, buffer))[4]
        arguments["is_token_in_rank"].fill_(False)
        arguments["topk_idx"].fill_(0)
        del before[4:]
        assert all(torch.equal(a, b) for a, b in zip(before, got[4][:4]))
        assert torch.equal(got[4][4], other[4]) and torch.equal(got[4][5], other[5])
        assert torch.equal(buffer.dispatch(rows(world), handle=got[4])[0], got[0])
        call, late = few_home(world, buffer)
        with pytest.raises(waybill.InvalidArgument, match=r"topk_idx of rank . is another than in"):
            call(**{**late, "topk_idx": choices().flip(0)})
        call(**late)

    waybill.run_threads(WORLD, body, timeout_s=10.0)


def test_many_in_flight_and_events():
    """Five low-latency dispatches, combined in reverse, with hooks called late, or twice."""

    def body(world):
        buffer, flight = new(world), []
        for number in range(5):
            x = torch.full((COUNT, HIDDEN), number + 1.0 + 10 * world.rank).bfloat16()
            got = buffer.low_latency_dispatch(
                x, choices(), MOST, EXPERTS, use_fp8=False, return_recv_hook=True
            )
            flight.append((x, got))
            buffer.dispatch(**given(world, buffer))
        for x, got in reversed(flight):
            got[4]()
            got[4]()
            out = torch.empty(COUNT, HIDDEN, dtype=torch.bfloat16)
            sums, event, hook = buffer.low_latency_combine(
                got[0], choices(), torch.ones(COUNT, TOPK), got[2], out=out, return_recv_hook=True
            )
            hook()
            assert sums is out and torch.equal(out, x * (choices() >= 0).sum(1, keepdim=True))
            with pytest.raises(waybill.InvalidArgument, match=r"there is no event to wait for"):
                event.current_stream_wait()
        for wrong in (5, EventOverlap(event=5), torch.ones(1)):
            with pytest.raises(waybill.InvalidArgument, match=r"previous_event (is|holds) a "):
                buffer.dispatch(**given(world, buffer), previous_event=wrong)

    waybill.run_threads(WORLD, body, timeout_s=10.0)
