"""deep_ep calls that begin behind an event from before, while the caller's stream is behind: what
they read and what they overwrite. On CPU ranks, which have no streams, the same calls.
"""

import pytest

pytest.importorskip("torch")

import torch
from deep_ep_cases import BYTES, EXPERTS, HIDDEN, MOST, WORLD, arrivals, everyone, layout_of, settle

from waybill.integrations.deep_ep import Buffer, ElasticBuffer

DELAY = 100_000_000  # cycles: 50 ms and more


def delay(device):
    """The current stream has work."""
    if device != "cpu":
        torch.cuda._sleep(DELAY)


def on_ranks(way, make, body):
    def one_rank(world):
        buffer = make(world)
        body(buffer, world.rank)
        settle(way.device)
        buffer.destroy()

    way.run(WORLD, one_rank)


def elastic(world):
    return ElasticBuffer(
        world, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=3, deterministic=True,
        explicitly_destroy=True,
    )  # fmt: skip


def dispatch(buffer, mine, event, sync=False):
    return buffer.dispatch(
        mine.x, mine.ids, mine.weights, num_experts=EXPERTS, do_cpu_sync=sync,
        previous_event=event, async_with_compute_stream=True,
    )  # fmt: skip


def test_ids_are_copied_behind_the_event_that_was_given(torch_way):
    """Not on the caller's stream, where the copy would come when the call has read it."""

    def body(buffer, rank):
        ranks = everyone(device=torch_way.device)
        mine = ranks[rank]
        dispatch(buffer, mine, buffer.capture())[-1].current_stream_wait()  # makes its layers
        settle(torch_way.device)
        event = buffer.capture()
        wrong = [torch.full_like(mine.ids, EXPERTS) for _ in range(4)]
        settle(torch_way.device)
        del wrong  # what a copy on this stream would find in its memory
        delay(torch_way.device)
        got, _, _, handle, done = dispatch(buffer, mine, event)
        done.current_stream_wait()
        settle(torch_way.device)
        want = arrivals(ranks, rank)
        assert torch.equal(got[: len(want)], want) and torch.equal(handle.topk_idx, mine.ids)

    on_ranks(torch_way, elastic, body)


@pytest.mark.parametrize("expanded", [False, True])
def test_what_an_elastic_handle_says_is_read_before_its_memory_is_used_again(torch_way, expanded):
    name = "num_unaligned_recv_tokens_per_expert"

    def body(buffer, rank):
        device = torch_way.device
        first = everyone(device=device)[rank]
        others = everyone(1, device=device, tokens=(0, 7, 1))[rank]

        def call(mine, event):
            *_, handle, done = buffer.dispatch(
                mine.x, mine.ids, mine.weights, num_experts=EXPERTS, do_cpu_sync=False,
                do_expand=expanded, previous_event=event, async_with_compute_stream=True,
            )  # fmt: skip
            return handle, done

        handle, done = call(first, buffer.capture())
        done.current_stream_wait()
        want = getattr(handle, name).tolist()
        for _ in range(3):
            handle, done = call(first, buffer.capture())
            done.current_stream_wait()
            event = buffer.capture()
            delay(device)
            late = getattr(handle, name)
            del handle
            for _ in range(3):
                done = call(others, event)[1]
            done.current_stream_wait()
            settle(device)
            assert late.tolist() == want

    on_ranks(torch_way, elastic, body)


def test_what_a_handle_of_a_buffer_says_is_read_before_its_memory_is_used_again(torch_way):
    def body(buffer, rank):
        device = torch_way.device
        first = everyone(device=device)[rank]
        others = everyone(1, device=device, tokens=(0, 7, 1))[rank]
        first.layout, others.layout = layout_of(buffer, first), layout_of(buffer, others)

        def call(mine, event):
            *_, handle, done = buffer.dispatch(
                mine.x, topk_idx=mine.ids, topk_weights=mine.weights, **mine.layout,
                num_worst_tokens=WORLD * MOST, previous_event=event, async_finish=True,
            )  # fmt: skip
            return handle, done

        handle, done = call(first, buffer.capture())
        done.current_stream_wait()
        settle(device)
        want = [handle[entry].tolist() for entry in (0, 5)]
        handle, done = call(first, buffer.capture())
        done.current_stream_wait()
        event = buffer.capture()
        delay(device)
        late = [handle[entry] for entry in (0, 5)]
        del handle
        for _ in range(3):
            done = call(others, event)[1]
        done.current_stream_wait()
        settle(device)
        assert [entry.tolist() for entry in late] == want

    on_ranks(torch_way, lambda world: Buffer(world, 4 * BYTES, explicitly_destroy=True), body)
