"""ExpertParallel with copies of hot experts: as without copies, to the rounding of the sums."""

import copy
import math
import threading

import pytest

torch = pytest.importorskip("torch")

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

import waybill  # noqa: E402
from waybill.torch.moe import ExpertParallel, SwiGLUExperts  # noqa: E402

HIDDEN, INNER, LOCAL, TOPK, MOST = 16, 32, 2, 2, 24


class Lists(torch.nn.Module):
    """Experts with a parameter for each matrix, and the interface of two functions."""

    def __init__(self, stacked):
        super().__init__()
        self.first = torch.nn.ParameterList(stacked.gate.detach().clone().unbind())
        self.second = torch.nn.ParameterList(stacked.down.detach().clone().unbind())
        self.used = {}

    def expert_tensors(self, expert):
        return [self.first[expert], self.second[expert]]

    def use_tensors(self, slot, tensors):
        self.used[slot] = tensors

    def forward(self, rows, ends):
        parts, begin = [], 0
        for slot, end in enumerate(ends.tolist()):
            if self.used.get(slot) is not None or not self.used:
                one, two = self.used[slot] if self.used else self.expert_tensors(slot)
                parts.append(torch.relu(rows[begin:end] @ one) @ two)
            begin = end
        return torch.cat([*parts, rows[begin:]])


def draws_of(seed):
    """Ranks are threads, which share torch's own generator."""
    return torch.Generator().manual_seed(seed)


def experts_of(rank, kind="stacked", dtype=torch.float32):
    experts, draws = SwiGLUExperts(LOCAL, HIDDEN, INNER, dtype), draws_of(100 + rank)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draws) / weight.shape[1] ** 0.5)
    return Lists(experts) if kind == "lists" else experts


def batch(rank, world, seed, empty=None):
    """Tokens, scores, ids that like expert 0, a gradient. Rank ``empty`` has none."""
    draws = draws_of(1000 * seed + rank)
    count = 0 if rank == empty else MOST - rank
    x = torch.randn(count, HIDDEN, generator=draws)
    scores, ids = torch.rand(count, world * LOCAL, generator=draws).topk(TOPK)
    hot = torch.rand(count, generator=draws) < 0.7
    ids[hot, 0] = seed % 2
    ids[torch.rand(ids.shape, generator=draws) < 0.1] = -1
    return x, scores, ids, torch.randn(count, HIDDEN, generator=draws)


def module_on(world, experts, **options):
    given = {"spare_experts": 2, "dtype": torch.float32, **options}
    if given["spare_experts"] != 0:
        given = {"min_rows": 1, "limit": 1.0, **given}
    return ExpertParallel(
        experts, num_experts=world.world_size * LOCAL, topk=TOPK, hidden=HIDDEN, max_tokens=MOST,
        group=world, gradients="sum", **given,
    )  # fmt: skip


def without(**options):
    return {name: value for name, value in options.items() if name not in ("keep_copies",)} | {
        "spare_experts": 0
    }


def one_step(module, inputs):
    x, scores, ids, gradient = (one.clone() for one in inputs)
    x.requires_grad_()
    scores.requires_grad_()
    out = module(x, scores, ids)
    out.backward(gradient)
    return [out.detach(), x.grad, scores.grad]


def close(got, wanted):
    """To the rounding of float32 sums of other parts."""
    largest = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("kind", ["stacked", "lists"])
@pytest.mark.parametrize("options", [
    {}, {"keep_copies": True}, {"chunks": 2}, {"weights": "experts"}, {"windows": "own"},
    {"fixed_rows": 4 * MOST * TOPK},
])  # fmt: skip
def test_as_without_copies(kind, options):
    if kind == "lists" and "weights" in options:
        pytest.skip("these experts take no weights")
    world_size, steps = 4, 5

    def body(world):
        own = experts_of(world.rank, kind)
        other = copy.deepcopy(own)
        module = module_on(world, own, **options)
        plain = module_on(world, other, **without(**options))
        for seed in range(steps):  # rank `seed - 1` is empty
            inputs = batch(world.rank, world_size, seed, empty=seed - 1)
            for got, wanted in zip(one_step(module, inputs), one_step(plain, inputs)):
                close(got, wanted)
        for got, wanted in zip(own.parameters(), other.parameters()):
            close(got.grad, wanted.grad)  # gradients of all steps
        module.finalize()
        plain.finalize()

    waybill.run_threads(world_size, body)


@pytest.mark.parametrize("keep", [False, True])
def test_layers_share_the_pool_and_checkpoints_fetch_again(keep):
    from torch.utils.checkpoint import checkpoint

    def body(world):
        own = [experts_of(world.rank), experts_of(world.rank + 7)]
        other = copy.deepcopy(own)
        modules = [module_on(world, one, keep_copies=keep) for one in own]
        plain = [module_on(world, one, spare_experts=0) for one in other]
        optimizer = torch.optim.SGD([p for one in own for p in one.parameters()], lr=1e-5)
        reference = torch.optim.SGD([p for one in other for p in one.parameters()], lr=1e-5)

        def both(layers, x, scores, ids, again):
            for layer in layers:
                if again:
                    x = x + checkpoint(layer, x, scores, ids, use_reentrant=False)
                else:
                    x = x + layer(x, scores, ids)
            return x

        for seed in range(4):
            for micro in range(2):  # two forwards, then two backwards
                given = [batch(world.rank, 4, 10 * seed + m + micro) for m in range(2)]
                outs, wanted = [], []
                for m, (x, scores, ids, _) in enumerate(given):
                    x.requires_grad_()
                    outs.append(both(modules, x, scores, ids, m == 1))
                    wanted.append(both(plain, x, scores, ids, False))
                for out, want, (*_, gradient) in zip(outs, wanted, given):
                    close(out, want)
                    out.backward(gradient)
                    want.backward(gradient)
            for one, two in zip(own, other):
                for got, want in zip(one.parameters(), two.parameters()):
                    close(got.grad, want.grad)
            for stepper in (optimizer, reference):
                stepper.step()
                stepper.zero_grad()

    waybill.run_threads(4, body)


class Counted:
    """An exchange that counts its calls."""

    def __init__(self, compiled):
        self.compiled, self.fetched = compiled, 0

    def __getattr__(self, name):
        if name == "fetch_weights":
            self.fetched += 1
        return getattr(self.compiled, name)


def test_kept_copies_are_void_when_weights_change():
    def body(world):
        own = experts_of(world.rank)
        module = module_on(world, own, keep_copies=True).eval()
        shared = module._copies[0]._exchange
        shared.compiled = counted = Counted(shared.compiled)
        inputs = batch(world.rank, 2, 0)[:3]

        def calls(change=None):
            if change is not None and world.rank == 0:
                change()
            before = counted.fetched
            plain = module_on(world, copy.deepcopy(own), spare_experts=0)
            with torch.no_grad():
                close(module(*inputs), plain(*inputs))
            plain.finalize()
            return counted.fetched - before

        assert calls() == 1
        assert calls() == 0  # they are there

        def step():
            for weight in own.parameters():
                weight.grad = torch.ones_like(weight)
            torch.optim.SGD(own.parameters(), lr=0.1).step()

        assert calls(step) == 1
        assert calls() == 0
        state = {name: value * 2 for name, value in own.state_dict().items()}
        assert calls(lambda: own.load_state_dict(state)) == 1
        with torch.no_grad():
            assert calls(lambda: own.gate[0, 0].add_(1)) == 1
        assert calls() == 0

        def behind():
            own.gate.data[0].mul_(3)  # no version counter shows it
            module.forget_copies()

        assert calls(behind) == 1
        assert calls() == 0

    waybill.run_threads(2, body)


@pytest.mark.parametrize("way", ["fused", "masters", "other thread"])
def test_kept_copies_are_void_after_steps_that_no_version_counter_shows(way):
    def body(world):
        own = experts_of(world.rank)
        module = module_on(world, own, keep_copies=True).eval()
        plain = module_on(world, own, spare_experts=0)
        weights = list(own.parameters())
        masters = [one.detach().clone() for one in weights] if way == "masters" else weights
        optimizer = torch.optim.AdamW(masters, lr=0.1, fused=True)
        inputs = batch(world.rank, 2, 0)[:3]
        for _ in range(3):
            with torch.no_grad():
                close(module(*inputs), plain(*inputs))
            for one in masters:
                one.grad = torch.ones_like(one)
            versions = [one._version for one in weights]
            if way == "other thread":
                stepping = threading.Thread(target=optimizer.step)
                stepping.start()
                stepping.join()
            else:
                optimizer.step()
            if way == "masters":
                for one, master in zip(weights, masters):
                    one.data.copy_(master)
            assert versions == [one._version for one in weights]
        module.finalize()
        plain.finalize()

    waybill.run_threads(2, body)


@pytest.mark.parametrize("keep", [False, True])
def test_experts_that_are_put_in_place_of_others(keep):
    def body(world):
        module = module_on(world, experts_of(world.rank), keep_copies=keep)
        inputs = batch(world.rank, 2, 0)
        one_step(module, inputs)
        own = module.experts = experts_of(world.rank + 7)
        other = copy.deepcopy(own)
        plain = module_on(world, other, spare_experts=0)
        for got, wanted in zip(one_step(module, inputs), one_step(plain, inputs)):
            close(got, wanted)
        for got, wanted in zip(own.parameters(), other.parameters()):
            close(got.grad, wanted.grad)
        module.experts = SwiGLUExperts(LOCAL, HIDDEN, INNER + 1)
        with pytest.raises(waybill.InvalidArgument, match="as when the module was made"):
            module(*inputs[:3])
        module.experts = own.double()  # copies came as bytes of float32
        with pytest.raises(
            waybill.InvalidArgument, match=r" \[\d+, \d+\] torch.float64, .*torch.float32, as when"
        ):
            module(*inputs[:3])
        module.experts = own.float()
        assert one_step(module, inputs)[0].isfinite().all()

    waybill.run_threads(2, body)


def test_a_rank_whose_experts_alone_are_frozen():
    """Its copies have no gradients that would come home: all are told at once."""

    def body(world):
        experts = experts_of(world.rank).requires_grad_(world.rank != 1)
        module = module_on(world, experts)
        with pytest.raises(waybill.Disagreement, match="the tensors' format"):
            one_step(module, batch(world.rank, 2, 0))

    waybill.run_threads(2, body)


def train(world_size, spare, steps=50, **options):
    """Losses and weights of all ranks after some steps of a small mixture with a skewed router."""
    found = {}

    def body(world):
        rank = world.rank
        own = experts_of(rank)
        module = module_on(world, own, spare_experts=spare, **options)
        router = torch.nn.Linear(HIDDEN, world_size * LOCAL)
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape, generator=draws_of(5)) / 8)
            router.bias.zero_()
            router.bias[0] += 2  # most choose expert 0
        counted = None
        for copies in module._copies:
            counted = copies._exchange.compiled = Counted(copies._exchange.compiled)
        optimizer = torch.optim.SGD([*own.parameters(), *router.parameters()], lr=0.02)
        draws, losses = draws_of(rank), []
        for step in range(steps):
            count = 0 if rank == step % (world_size + 3) else MOST  # each in turn is empty
            x = torch.randn(count, HIDDEN, generator=draws)
            scores, ids = router(x).softmax(-1).topk(TOPK)
            loss = (x + module(x, scores, ids) - x.roll(1, -1)).square().sum() / MOST
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = [one.detach().clone() for one in (*own.parameters(), *router.parameters())]
        found[rank] = losses, weights
        assert counted is None or counted.fetched >= steps - 1
        module.finalize()

    waybill.run_threads(world_size, body)
    return [found[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_training_is_the_same_as_without_copies(world_size):
    plain = train(world_size, 0)
    for options in ({}, {"keep_copies": True}):
        copied, again = (train(world_size, 2, **options) for _ in range(2))
        for (losses, weights), (want, want_weights) in zip(copied, plain):
            assert losses == pytest.approx(want, rel=1e-4, abs=1e-5)
            for got, wanted in zip(weights, want_weights):
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
        for (losses, weights), (same, same_weights) in zip(copied, again):
            assert losses == same
            for got, wanted in zip(weights, same_weights):
                assert torch.equal(got, wanted)


def test_memory():
    def body(world):
        own = [experts_of(world.rank) for _ in range(3)]
        one, two, kept = (
            module_on(world, experts, keep_copies=keep)
            for experts, keep in zip(own, (False, False, True))
        )
        plain = module_on(world, own[0], spare_experts=0)
        of_expert = 3 * HIDDEN * INNER * 4
        for module in (one, two, kept):
            made = module.memory()
            assert made["windows"] == module.layer.memory_bytes > 0
            assert made["copies"] == made["copies_if_kept"] == 2 * of_expert
            assert made["copy_gradients"] == 2 * of_expert
        assert one._copies[0]._pool() is two._copies[0]._pool()
        assert kept._copies[0]._pool() is not one._copies[0]._pool()
        assert plain.memory() == {
            "windows": plain.layer.memory_bytes, "copies": 0, "copy_gradients": 0,
            "copies_if_kept": 0,
        }  # fmt: skip

    waybill.run_threads(2, body)


def test_frozen_parameters_and_bfloat16():
    def body(world):
        own = experts_of(world.rank, dtype=torch.bfloat16)
        own.up.requires_grad_(False)
        other = copy.deepcopy(own)
        module = module_on(world, own, dtype=torch.bfloat16)
        plain = module_on(world, other, dtype=torch.bfloat16, spare_experts=0)
        x, scores, ids, gradient = batch(world.rank, 4, 0)
        for one in (module, plain):
            one(x.bfloat16(), scores, ids).backward(gradient.bfloat16())
        assert own.up.grad is None
        for got, wanted in ((own.gate, other.gate), (own.down, other.down)):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=0.05, atol=0.5)
        for frozen in own.parameters():
            frozen.requires_grad_(False)
        x = x.bfloat16().requires_grad_()
        module(x, scores, ids).backward(gradient.bfloat16())
        assert x.grad is not None

    waybill.run_threads(4, body)


def test_refused_by_name():
    def body(world):
        def refuses(error, text, experts=None, **options):
            with pytest.raises(error, match=text):
                module_on(world, experts or experts_of(world.rank), **options)

        wrong = torch.nn.Linear(HIDDEN, HIDDEN)
        refuses(waybill.InvalidArgument, r"parameter weight of experts has shape \[16, 16\]", wrong)
        refuses(
            waybill.InvalidArgument, "expected a module whose parameters", lambda rows, ends: rows
        )
        refuses(waybill.InvalidArgument, "keep_copies = True", spare_experts=0, keep_copies=True)
        refuses(waybill.InvalidArgument, "limit = 0.5", limit=0.5)
        refuses(waybill.InvalidArgument, "spare_experts = -1", spare_experts=-1)
        sharded = type("FSDPModule", (SwiGLUExperts,), {})(LOCAL, HIDDEN, INNER)
        refuses(waybill.Unsupported, "sharded by FSDP", sharded)
        inside = torch.nn.Sequential(sharded)
        refuses(waybill.Unsupported, "sharded by FSDP", inside)
        wrapped = type("DistributedDataParallel", (SwiGLUExperts,), {})(LOCAL, HIDDEN, INNER)
        refuses(waybill.Unsupported, "wrapped by DDP", wrapped)
        scaled = experts_of(world.rank)
        scaled.register_buffer("scale", torch.ones(LOCAL, 1))  # copies would be scaled as others
        refuses(
            waybill.InvalidArgument, rf"buffer scale of experts has shape \[{LOCAL}, 1\]", scaled
        )
        whole = experts_of(world.rank)
        whole.register_buffer("count", torch.zeros(()))
        module = module_on(world, whole)
        step = one_step(module, batch(world.rank, 2, 0))
        assert step[0].isfinite().all()  # nothing above has told anybody
        layer = module.layer
        with pytest.raises(waybill.InvalidArgument, match="spare_experts = 0, expected 2"):
            ExpertParallel(
                experts_of(world.rank), num_experts=2 * LOCAL, topk=TOPK, hidden=HIDDEN,
                max_tokens=MOST, gradients="sum", layer=layer,
            )  # fmt: skip

    waybill.run_threads(2, body)


@pytest.mark.parametrize("kind", ["stacked", "lists"])
@pytest.mark.parametrize(("options", "per_node", "rows"), [
    # Float32 weights of 4 bytes there and again, and as much of a gradient, for 6 operations.
    ({}, 2, 600e12 * (2 * 4 + 4) / 6 / 345e9), ({}, 1, 600e12 * (2 * 4 + 4) / 6 / 50e9),
    ({"keep_copies": True}, 2, 600e12 * (4 + 4) / 6 / 345e9),
    ({"dtype": torch.bfloat16}, 2, 600e12 * (2 * 2 + 4) / 6 / 345e9),
])  # fmt: skip
def test_min_rows_that_pay(kind, options, per_node, rows):
    """What these experts' bytes and the links between the ranks make of it; a batch of fewer rows
    needs no copies.
    """
    dtype = options.get("dtype", torch.float32)

    def body(world):
        experts = experts_of(world.rank, kind, dtype)
        module = module_on(world, experts, min_rows="pays", **options)
        assert module.layer.min_rows == math.ceil(rows)
        with pytest.raises(waybill.InvalidArgument, match="min_rows = 'often', expected an int"):
            module_on(world, experts, min_rows="often", **options)
        if options:
            return
        plain = module_on(world, copy.deepcopy(experts), spare_experts=0)
        inputs = batch(world.rank, 2, 0)
        for got, wanted in zip(one_step(module, inputs), one_step(plain, inputs)):
            assert torch.equal(got, wanted)

    waybill.run_threads(2, body, ranks_per_node=per_node)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("spare_experts", 1, "spare_experts = 1"), ("limit", 1.5, "limit = 1.5"),
    ("min_rows", 7, "min_rows = 7"), ("keep_copies", True, "keep_copies = True"),
    ("spare_experts", 0, "spare_experts = 0"),
])  # fmt: skip
def test_ranks_that_differ_are_told(name, value, said):
    def body(world):
        options = {name: value} if world.rank == 1 else {}
        with pytest.raises(waybill.InvalidArgument, match=f"rank 1 with {said}"):
            module_on(world, experts_of(world.rank), **options)
        module = module_on(world, experts_of(world.rank))  # nobody waits for anybody
        assert one_step(module, batch(world.rank, 2, 0))[0].isfinite().all()

    waybill.run_threads(2, body)


def test_tensors_of_an_expert_may_be_slices():
    def body(world):
        own, other = Slices(experts_of(world.rank)), experts_of(world.rank)
        modules = module_on(world, own), module_on(world, other, spare_experts=0)
        inputs = batch(world.rank, 2, 0)
        for got, wanted in zip(*(one_step(module, inputs) for module in modules)):
            close(got, wanted)
        for got, wanted in zip(own.parameters(), other.parameters()):
            close(got.grad, wanted.grad)

    waybill.run_threads(2, body)


class Slices(torch.nn.Module):
    """Experts of the two functions, whose tensors are slices of parameters."""

    def __init__(self, stacked):
        super().__init__()
        self.stacked, self.used = stacked, {}

    def expert_tensors(self, expert):
        return [one[expert] for one in self.stacked.parameters()]

    def use_tensors(self, slot, tensors):
        self.used[slot] = tensors

    def forward(self, rows, ends):
        slots = [slot for slot, tensors in sorted(self.used.items()) if tensors is not None]
        tensors = [torch.stack(part) for part in zip(*(self.used[slot] for slot in slots))]
        names = [name for name, _ in self.stacked.named_parameters()]
        given = (rows, ends[slots])
        return torch.func.functional_call(self.stacked, dict(zip(names, tensors)), given)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_error_of_one_rank_reaches_the_others_in_the_midst_of_copies(when):
    """Rank 1 leaves while others wait for weights or gradients of copies."""

    class Falls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            if when == "forward":
                raise RuntimeError("these experts fall")
            return rows.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("these experts fall")

    class Falling(SwiGLUExperts):
        def forward(self, rows, ends):
            return super().forward(Falls.apply(rows), ends)

    seen = {}

    def body(world):
        kind = Falling if world.rank == 1 else SwiGLUExperts
        module = module_on(world, kind(LOCAL, HIDDEN, INNER))
        try:
            one_step(module, batch(world.rank, 3, 0))
        except waybill.Error as error:
            seen[world.rank] = str(error)
            raise

    with pytest.raises(RuntimeError, match="these experts fall"):
        waybill.run_threads(3, body, timeout_s=60)
    assert set(seen) == {0, 2}, seen
    assert all("rank 1" in words for words in seen.values()), seen
