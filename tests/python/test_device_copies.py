"""What ExpertParallel does with copies on GPUs, on CPU ranks: with a store whose two calls are
those of CPU ranks. What a GPU's store does is tested where a GPU is.
"""

import copy
import ctypes
import threading
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

from test_expert_parallel_copies import (  # noqa: E402
    HIDDEN,
    INNER,
    MOST,
    TOPK,
    batch,
    close,
    experts_of,
    module_on,
    one_step,
)

import waybill  # noqa: E402
from waybill import _core  # noqa: E402
from waybill.torch.experts import copies, device_copies, expert_parallel  # noqa: E402


def array_at(address, shape):
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))
    return np.ctypeslib.as_array(pointer, shape).astype(np.int64)


class HostStore:
    """``_core.CopyStore`` in host memory."""

    fetched = 0  #: copies that have come, as counted by all ranks
    lock = threading.Lock()

    def __init__(self, world, size, spare):
        self.memory = np.full(size, 0x7F, np.int8)  # nothing reads what nobody has brought
        self.exchange, self.spare, self.held = _core.CopyExchange(world), spare, {}

    def bytes(self, first, count):
        return self.memory[first : first + count]

    def slots_of(self, tables, sizes, ranks):
        experts, spare = sizes
        shape = (ranks, experts // ranks + spare)
        slots, quotas = (array_at(table, shape) for table in tables)
        slots[:, -spare:][quotas[:, -spare:] == 0] = -1
        return slots

    def addresses(self, parts, copies, spare, wide):
        each = [n * (8 if d == "float64" else 4 if wide or d == "float32" else 2) for n, d in parts]
        return [at + s * n for s in range(spare) for at, n in zip(copies, each)]

    def fetch_weights(self, tables, sizes, parts, home, copies, held, stream):
        owner, stamp, fresh = held
        stamps = self.exchange.exchange_versions(stamp, owner)
        experts, spare = sizes
        slots = self.slots_of(tables, sizes, len(stamps))
        missing = []
        for rank, row in enumerate(slots):
            for s, expert in enumerate(row[-spare:]):
                wanted = (owner, expert, stamps[expert // (experts // len(stamps))])
                if expert >= 0 and (fresh or self.held.get((rank, s)) != wanted):
                    missing.append(((rank, s), wanted))
                else:
                    row[len(row) - spare + s] = -1
        if missing:
            self.held = {at: one for at, one in self.held.items() if one[0] == owner}
        self.held.update(missing)
        with HostStore.lock:
            HostStore.fetched += len(missing)
        to = self.addresses(parts, copies, spare, False)
        self.exchange.fetch_weights(slots, experts, parts, home, to, owner)

    def add_gradients(self, tables, sizes, parts, home, copies, held, stream):
        ranks = len(self.exchange.exchange_versions(0, held[0]))
        slots = self.slots_of(tables, sizes, ranks)
        to = self.addresses(parts, copies, sizes[1], True)
        self.exchange.add_gradients(slots, sizes[0], parts, home, to, held[0])

    def finalize(self):
        self.exchange.finalize()


@pytest.fixture
def on_device(monkeypatch):
    """Modules are made as on GPUs."""

    def copies_for(experts, layer, keep_copies):
        if not layer.spare_experts:
            return ()
        return (device_copies.DeviceCopies(experts, layer, keep_copies),)

    monkeypatch.setattr(copies, "_core", types.SimpleNamespace(CopyStore=HostStore))
    monkeypatch.setattr(expert_parallel, "copies_for", copies_for)
    monkeypatch.setattr(HostStore, "fetched", 0)


@pytest.mark.parametrize("kind, options", [
    ("stacked", {}), ("stacked", {"keep_copies": True}), ("stacked", {"chunks": 2}),
    ("stacked", {"fixed_rows": 4 * MOST * TOPK}),
    ("stacked", {"fixed_rows": 4 * MOST * TOPK, "weights": "experts"}),
    ("lists", {}), ("lists", {"fixed_rows": 4 * MOST * TOPK}),
])  # fmt: skip
def test_as_without_copies(on_device, kind, options):
    def body(world):
        own = experts_of(world.rank, kind)
        other = copy.deepcopy(own)
        module = module_on(world, own, **options)
        assert isinstance(module._copies[0], device_copies.DeviceCopies)
        plain = module_on(world, other, **{**options, "spare_experts": 0, "keep_copies": False})
        for step in range(4):
            inputs = batch(world.rank, 4, step, empty=step)
            for got, wanted in zip(one_step(module, inputs), one_step(plain, inputs)):
                close(got, wanted)
            for got, wanted in zip(own.parameters(), other.parameters()):
                close(got.grad, wanted.grad)
                with torch.no_grad():
                    got -= 0.01 * got.grad
                    wanted -= 0.01 * wanted.grad
                got.grad = wanted.grad = None
        module.finalize()
        plain.finalize()

    waybill.run_threads(4, body)
    assert HostStore.fetched >= 4


def test_a_pool_is_fetched_again_by_backward_if_others_have_used_it(on_device):
    def body(world):
        one, two = (module_on(world, experts_of(world.rank)) for _ in range(2))
        x, scores, ids, _ = batch(world.rank, 2, 0)
        counts = []

        def counted(call):
            world.barrier()
            before = HostStore.fetched
            world.barrier()
            made = call()
            world.barrier()
            counts.append(HostStore.fetched - before)
            return made

        alone = counted(lambda: one(x, scores, ids).sum())
        counted(alone.backward)
        both = counted(lambda: two(one(x, scores, ids), scores, ids).sum())
        counted(both.backward)
        forward, backward, forwards, backwards = counts
        assert forward > 0 and backward == 0  # they lay there
        assert forwards == 2 * forward
        assert backwards == forward  # those of the first module
        one.finalize()
        two.finalize()

    waybill.run_threads(2, body)


def test_kept_copies_come_again_when_weights_have_changed(on_device):
    def body(world):
        own = experts_of(world.rank)
        module = module_on(world, own, keep_copies=True)
        x, scores, ids, _ = batch(world.rank, 2, 0)

        def fetched():
            world.barrier()
            before = HostStore.fetched
            world.barrier()
            module(x, scores, ids).sum().backward()
            world.barrier()
            return HostStore.fetched - before

        first = fetched()
        assert first > 0
        assert fetched() == 0
        with torch.no_grad():
            own.gate.mul_(2)
        assert fetched() == first
        module.forget_copies()
        assert fetched() == first
        module.eval()
        assert module._copies[0].before_dispatch(module.experts, module.layer, False) is not None
        assert module._copies[0].before_dispatch(module.experts, module.layer, True) is None
        assert fetched() == 0
        module.finalize()

    waybill.run_threads(2, body)


def test_a_checkpoint_makes_the_same_copies_again(on_device):
    from torch.utils.checkpoint import checkpoint

    def body(world):
        own = experts_of(world.rank)
        other = copy.deepcopy(own)
        module, plain = module_on(world, own), module_on(world, other)
        x, scores, ids, gradient = batch(world.rank, 2, 1)
        checkpoint(module, x.requires_grad_(), scores, ids, use_reentrant=False).backward(gradient)
        plain(x.detach(), scores, ids).backward(gradient)
        for got, wanted in zip(own.parameters(), other.parameters()):
            assert torch.equal(got.grad, wanted.grad)

    waybill.run_threads(2, body)


def test_memory_holds_gradients_all_the_time(on_device):
    def body(world):
        module = module_on(
            world, experts_of(world.rank, dtype=torch.bfloat16), dtype=torch.bfloat16
        )
        elements = 2 * 3 * HIDDEN * INNER
        made = module.memory()
        assert (made["copies"], made["copy_gradients"]) == (2 * elements, 4 * elements)
        assert made["copies_if_kept"] == 6 * elements
        kept = module_on(
            world, experts_of(world.rank, dtype=torch.bfloat16), dtype=torch.bfloat16,
            keep_copies=True,
        )  # fmt: skip
        made = kept.memory()
        assert made["copies"] + made["copy_gradients"] == made["copies_if_kept"] == 6 * elements

    waybill.run_threads(2, body)
