"""Ranks of a layer of experts that do not mean the same call: all are told, none gets a result."""

import time

import pytest
from error_texts import UNUSABLE

torch = pytest.importorskip("torch")

from waybill import Disagreement, InvalidArgument, TransportError  # noqa: E402
from waybill.torch import run_threads  # noqa: E402
from waybill.torch.moe import EPAll2AllLayer  # noqa: E402

HIDDEN, TOPK, TOKENS = 8, 2, 3
DEADLINE = 20  # nobody should have to wait for it
SOON = 10


def layer_on(world, per_node=None, **options):
    return EPAll2AllLayer(
        world, options.pop("max_tokens", 4), HIDDEN, TOPK, world.rank,
        options.pop("num_experts", 2 * world.world_size), per_node or world.world_size,
        world.world_size, torch.float32, **options,
    )  # fmt: skip


class Step:
    """A layer of a rank, two dispatches, and what calls need."""

    def __init__(self, world, per_node):
        self.layer = layer_on(world, per_node)
        self.odd = world.rank == world.world_size - 1
        self.ids = torch.arange(TOKENS * TOPK).reshape(TOKENS, TOPK) % (2 * world.world_size)
        self.tokens = torch.ones(TOKENS, HIDDEN)
        self.weights = torch.ones(TOKENS, TOPK)
        self.first = self.dispatch(self.tokens, self.weights)
        self.second = self.dispatch(self.tokens, self.weights)

    def dispatch(self, tokens, weights=None, **options):
        return self.layer.dispatch(tokens, self.ids, weights, **options)

    def combine(self, dispatched, **options):
        return self.layer.combine(dispatched[0] * 2, dispatched[2], **options)

    def in_turn(self, call):
        """On the odd rank the second one comes first."""
        for dispatched in (self.second, self.first) if self.odd else (self.first, self.second):
            call(dispatched)


def needing(tensor, is_needed=True):
    return tensor.clone().requires_grad_(is_needed)


def weights_on_some(step):
    step.dispatch(step.tokens, None if step.odd else step.weights)


def known_routing_on_some(step):
    step.dispatch(step.tokens, layout_desc=step.first[2] if step.odd else None)


def dispatch_against_combine(step):
    step.dispatch(step.tokens) if step.odd else step.combine(step.first)


def two_combines(step):
    step.in_turn(step.combine)


def another_layout(step):
    step.combine(step.second if step.odd else step.first)


def weighted_on_some(step):
    step.combine(step.first, weighted=step.odd)


def tokens_gradients_on_some(step):
    step.dispatch(needing(step.tokens, step.odd), step.weights)


def weights_gradients_on_some(step):
    step.dispatch(needing(step.tokens), needing(step.weights, step.odd))


def no_gradients_of_combine_on_some(step):
    rows, _, layout = step.dispatch(needing(step.tokens), step.weights)
    with torch.set_grad_enabled(step.odd):
        step.layer.combine(rows, layout)


def two_backward_passes(step):
    losses = []
    for _ in range(2):
        rows, _, layout = step.dispatch(needing(step.tokens), step.weights)
        losses.append(step.layer.combine(rows * 2, layout).sum())
    for loss in reversed(losses) if step.odd else losses:
        loss.backward()


def backward_passes_of_dispatches(step):
    losses = []
    for _ in range(2):
        rows, _, _ = step.dispatch(needing(step.tokens), step.weights)
        losses.append(rows.sum())
    for loss in reversed(losses) if step.odd else losses:
        loss.backward()


def backward_passes_of_weights(step):
    losses = []
    for _ in range(2):
        _, weights, _ = step.dispatch(step.tokens, needing(step.weights))
        losses.append(weights.sum())
    for loss in reversed(losses) if step.odd else losses:
        loss.backward()


def dispatch_against_backward(step):
    """By the routing whose combine the others differentiate: rows would be their gradients."""
    rows, _, layout = step.dispatch(needing(step.tokens))
    sums = step.combine((rows, None, layout))
    step.dispatch(step.tokens, layout_desc=layout) if step.odd else sums.sum().backward()


def combine_against_backward(step):
    rows, _, layout = step.dispatch(needing(step.tokens))
    if not step.odd:
        return rows.sum().backward()
    with torch.no_grad():
        step.combine((rows, None, layout))


CASES = {
    weights_on_some: ": weights = ",
    known_routing_on_some: "dispatch with the layout of an earlier one",
    dispatch_against_combine: " calls ",
    two_combines: "belongs to dispatch ",
    another_layout: "belongs to dispatch ",
    weighted_on_some: ": weighted = ",
    tokens_gradients_on_some: ": needs_gradients = ",
    weights_gradients_on_some: ": weights_need_gradients = ",
    no_gradients_of_combine_on_some: ": needs_gradients = ",
    two_backward_passes: "belongs to dispatch ",
    backward_passes_of_dispatches: "belongs to dispatch ",
    backward_passes_of_weights: "belongs to dispatch ",
    dispatch_against_backward: ": backward = ",
    combine_against_backward: ": backward = ",
}


@pytest.mark.parametrize("calls", CASES, ids=lambda calls: calls.__name__)
@pytest.mark.parametrize(("world_size", "per_node"), [(2, 2), (4, 2)])
def test_a_difference_is_told_to_all(calls, world_size, per_node):
    def body(world):
        step = Step(world, per_node)
        start = time.monotonic()
        with pytest.raises(Disagreement) as told:
            calls(step)
        assert time.monotonic() - start < SOON
        if calls is not backward_passes_of_weights:  # they travel in a layer of their own
            with pytest.raises(TransportError, match=UNUSABLE):
                step.combine(step.first)
        return str(told.value)

    texts = run_threads(world_size, body, ranks_per_node=per_node, timeout_s=DEADLINE)
    for rank, text in enumerate(texts):
        for part in ("ranks disagree in call", f"rank {rank}", f"rank {world_size - 1}"):
            assert part in text
        assert CASES[calls] in text


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 12},
        {"max_tokens": 5},
        {"expert_alignment": 4},
        {"rows": "compact"},
        {"enable_local_combine": True},
        {"fixed_rows": 64},
        {"capacity": 3},
        {"dropped_id": -1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_are_compared_when_a_layer_is_made(options):
    def body(world):
        with pytest.raises(InvalidArgument) as told:
            layer_on(world, **(options if world.rank == 1 else {}))
        return str(told.value)

    for text in run_threads(3, body, timeout_s=DEADLINE):
        assert f"EPAll2AllLayer: rank 1 with {next(iter(options))} = " in text
        assert "expected the same on all ranks" in text


def test_what_a_rank_may_choose_is_no_difference():
    """Its number of tokens, num_sm, biases; whether gradients are needed where none are kept."""

    def body(world):
        layer = layer_on(world, num_sm=4 + world.rank)
        tokens = TOKENS if world.rank else 0
        ids = torch.zeros(tokens, TOPK, dtype=torch.int64)
        for _ in range(2):
            x, w = needing(torch.ones(tokens, HIDDEN)), needing(torch.ones(tokens, TOPK))
            rows, weights, layout = layer.dispatch(x, ids, w)
            biases = [torch.ones(tokens, HIDDEN)] * world.rank
            layer.combine(rows * weights[:, None], layout, biases=biases).sum().backward()
            with torch.no_grad():
                given = torch.ones(tokens, HIDDEN, requires_grad=world.rank == 1)
                rows, _, layout = layer.dispatch(given, ids, needing(w, world.rank == 0))
                layer.combine(rows, layout, weighted=True)
        layer.synchronize()
        layer.finalize()

    run_threads(3, body, timeout_s=DEADLINE)


def test_a_layout_belongs_to_one_layer():
    def body(world):
        layers = [layer_on(world) for _ in range(2)]
        tokens, ids = torch.ones(TOKENS, HIDDEN), torch.zeros(TOKENS, TOPK, dtype=torch.int64)
        rows, _, layout = layers[0].dispatch(tokens, ids)
        with pytest.raises(InvalidArgument, match="belongs to another layer"):
            layers[1].combine(rows, layout)
        layers[0].combine(rows, layout)
        for layer in layers:
            layer.finalize()

    run_threads(2, body, timeout_s=DEADLINE)
