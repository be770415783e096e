"""AttentionStep and recomputed_attention, which go in 0.3: they work until then, and warn."""

import pytest
from ways import rows_of

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

pytestmark = pytest.mark.filterwarnings("ignore:AttentionStep|recomputed_attention")
LENGTHS = [70, 10, 3, 17, 44, 1, 1, 30]
HEADS, KV_HEADS, HEAD = 4, 2, 8


@pytest.fixture(autouse=True)
def a_gpu_for_each_rank(request):
    """Where ranks share one, autograd has one thread for both, and what it loads at first use may
    wait for both: world.md says so.
    """
    device = getattr(request.node, "callspec", None) and request.node.callspec.params.get(
        "torch_way"
    )
    if device == "cuda" and waybill.num_gpus() == 1:
        pytest.skip("needs two GPUs")


def dot_product(q, k, v, visible):
    """Attention of one query shard; visible (queries, keys)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend(step, q, k, v):
    """Of what this rank received; without rows it computes nothing, and autograd sees nothing."""
    outputs = []
    for _, q_begin, q_len, kv_row, kv_len in zip(*(t.tolist() for t in step.attention)):
        rows, keys = slice(q_begin, q_begin + q_len), slice(kv_row, kv_row + kv_len)
        last = torch.arange(q_len, device=q.device)[:, None] + (kv_len - q_len)
        visible = torch.arange(kv_len, device=q.device)[None] <= last
        outputs.append(dot_product(q[rows], k[keys], v[keys], visible))
    if not outputs:
        return torch.empty(0, *q.shape[1:], dtype=q.dtype, device=q.device)
    return torch.cat(outputs)


def undistributed(q, k, v, weights):
    """Output and gradients of sum(output * weights), document by document."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    outputs, begin = [], 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        outputs.append(dot_product(q[rows], k[rows], v[rows], visible))
        begin += length
    output = torch.cat(outputs)
    (output * weights).sum().backward()
    return output.detach(), q.grad, k.grad, v.grad


def tensors(dtype=torch.float64):
    torch.manual_seed(3)
    shapes = [(HEADS, HEAD), (KV_HEADS, HEAD), (KV_HEADS, HEAD), (HEADS, HEAD)]
    return [torch.randn(sum(LENGTHS), *shape, dtype=dtype) for shape in shapes]


def plan_for(world_size, kv_layout, block_tokens=4):
    return waybill.plan(LENGTHS, world_size, 0, kv_layout=kv_layout, block_tokens=block_tokens)


def split(tensor, plan):
    """The rows of each rank."""
    return tensor.split(rows_of(plan))


def compare(results, expected, tolerance=1e-12):
    for i, want in enumerate(expected):
        got = torch.cat([rank[i].cpu() for rank in results])
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def leaves(world, parts):
    """This rank's Q, K and V, on its device."""
    mine = (part[world.rank] for part in parts[:3])
    return [part.to(world.device, copy=True).requires_grad_() for part in mine]


@pytest.mark.parametrize("kv_layout", ["per_rank", "per_query"])
def test_output_and_gradients(torch_way, kv_layout):
    plan = plan_for(2, kv_layout)
    routing, all_tensors = plan.to_routing(), tensors()
    parts = [split(t, plan) for t in all_tensors]

    def body(world):
        q, k, v = leaves(world, parts)
        weights = parts[3][world.rank].to(q.device)
        with torch_way.face.SequenceDispatcher(world) as dispatcher:
            step = torch_way.face.AttentionStep(dispatcher, routing, q, k, v)
            for _ in range(2):  # gradients add up; the second round must be as the first
                there = step.dispatch_qkv(q, k, v)
                out = step.return_outputs(attend(step, *there))
                (out * weights).sum().backward()
            dispatcher.synchronize()
        return out.detach(), q.grad / 2, k.grad / 2, v.grad / 2

    compare(torch_way.run(2, body), undistributed(*all_tensors))


def test_lengths_for_kernels():
    """Contexts of their own can be said by cu_seqlens, shared ones cannot."""

    def body(world):
        formats = tensors()[:3]
        with waybill.torch.SequenceDispatcher(world) as dispatcher:
            steps = [
                waybill.torch.AttentionStep(dispatcher, plan_for(2, layout).to_routing(), *formats)
                for layout in ("per_query", "per_rank")
            ]
        found = steps[0].varlen()
        assert found.cu_seqlens_q.dtype == found.cu_seqlens_k.dtype == torch.int32
        assert list(found.q_lens) == steps[0].attention.q_len.tolist()
        assert found.cu_seqlens_k[-1] == steps[0].attention.kv_len.sum()
        assert found.max_seqlen_k == steps[0].attention.kv_len.max()
        try:
            steps[1].varlen()
        except waybill.InvalidArgument as error:
            return str(error)
        return "all could be said"

    texts = waybill.torch.run_threads(2, body)
    assert any("keys of shard" in text and "per_query" in text for text in texts)


def test_backward_may_have_another_plan(torch_way):
    """Nothing is kept in the attention layout; backward computes it again, elsewhere."""
    plan, other = plan_for(2, "per_rank"), plan_for(2, "per_query", block_tokens=64)
    assert rows_of(plan) == rows_of(other) and plan != other
    all_tensors = tensors()
    parts = [split(t, plan) for t in all_tensors]
    routings = plan.to_routing(), other.to_routing()

    def body(world):
        q, k, v = leaves(world, parts)
        weights = parts[3][world.rank].to(q.device)
        with torch_way.face.SequenceDispatcher(world) as dispatcher:
            steps = [torch_way.face.AttentionStep(dispatcher, r, q, k, v) for r in routings]
            out = torch_way.face.recomputed_attention(attend, *steps, q, k, v)
            (out * weights).sum().backward()
            dispatcher.synchronize()
        return out.detach(), q.grad, k.grad, v.grad

    compare(torch_way.run(2, body), undistributed(*all_tensors))


def test_a_rank_without_rows_still_takes_part(torch_way):
    """Rank 1 attends to nothing and its attention leaves no trace for autograd."""
    plan = waybill.QkvPlan(2, [0, 1, 2], [3, 2], [0, 0], [0, 2], [0, 1])
    routing = plan.to_routing()

    def body(world):
        q, k, v = (
            torch.ones(3 - world.rank, 1, 2, device=torch_way.device, requires_grad=True)
            for _ in range(3)
        )
        with torch_way.face.SequenceDispatcher(world) as dispatcher:
            step = torch_way.face.AttentionStep(dispatcher, routing, q, k, v)
            received = step.dispatch_qkv(q, k, v)
            assert received[0].shape[0] == (0 if world.rank else 5)
            out = step.return_outputs(attend(step, *received))
            out.sum().backward()
            dispatcher.synchronize()
        return out.detach().cpu(), v.grad.cpu()

    got = torch_way.run(2, body)
    assert torch.equal(torch.cat([out for out, _ in got]), torch.ones(5, 1, 2))
    total = sum(grad.sum() for _, grad in got)  # weights of each query add up to 1
    torch.testing.assert_close(total, torch.tensor(10.0))


def test_rows_beyond_the_plan_have_no_gradient(torch_way):
    plan = waybill.QkvPlan(2, [0, 1, 2], [3, 2], [1, 0], [0, 2], [0, 1])

    def body(world):
        q, k, v = (
            torch.ones(6, 2, device=torch_way.device, requires_grad=True) for _ in range(3)
        )  # of which 3 or 2 are in the plan
        with torch_way.face.SequenceDispatcher(world) as dispatcher:
            step = torch_way.face.AttentionStep(dispatcher, plan.to_routing(), q, k, v)
            there = step.dispatch_qkv(q, k, v)
            home = step.return_outputs(there[0] * 2)
            assert home.shape[0] == 3 - world.rank
            (home.sum() + there[1].sum() + 3 * there[2].sum()).backward()
            dispatcher.synchronize()
        return [t.grad[:, 0].tolist() for t in (q, k, v)]

    first, second = torch_way.run(2, body)
    assert first == [[2, 2, 2, 0, 0, 0], [2, 2, 2, 0, 0, 0], [6, 6, 6, 0, 0, 0]]
    assert second == [[2, 2, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [3, 3, 0, 0, 0, 0]]


def test_pairs_that_are_interleaved():
    """The second dispatch is differentiated with the first output, and then again."""
    plan = plan_for(2, "per_rank")
    parts = [split(t, plan) for t in tensors()]

    def body(world):
        with wt.SequenceDispatcher(world) as dispatcher:
            qkv = [leaves(world, parts) for _ in range(2)]
            step = wt.AttentionStep(dispatcher, plan.to_routing(), *qkv[0])
            there = [step.dispatch_qkv(*one) for one in qkv]
            first, second = (step.return_outputs(attend(step, *one)) for one in there)
            first.sum().backward()
            with pytest.raises(waybill.InvalidArgument, match=r"dispatch_qkv: .* in pairs, or"):
                second.sum().backward()
            third = step.return_outputs(attend(step, *step.dispatch_qkv(*qkv[0])))
            third.sum().backward()
            with pytest.raises(waybill.InvalidArgument, match=r"return_outputs: .* retain_graph"):
                third.sum().backward()

    wt.run_threads(2, body)


def test_wrong_arguments():
    plan = plan_for(1, "per_rank")
    q = torch.zeros(sum(LENGTHS), 4)

    def body(world):
        dispatcher = waybill.torch.SequenceDispatcher(world)
        make = waybill.torch.AttentionStep
        for arguments, text in [
            ((None, plan.to_routing(), q, q), "dispatcher is a NoneType"),
            ((dispatcher, plan, q, q), "routing is a AttentionPlan, expected a QkvRouting"),
            ((dispatcher, plan.to_routing(), q), "no format of K and V"),
            ((dispatcher, plan.to_routing(), q, 7), r"kv\[0\] is a int"),
        ]:
            with pytest.raises(waybill.InvalidArgument, match=text):
                make(*arguments)
        step = make(dispatcher, plan.to_routing(), q, q)
        assert step.window_bytes <= dispatcher.window_bytes
        with pytest.raises(waybill.InvalidArgument, match=r"dispatch_qkv: kv\[0\] has dtype"):
            step.dispatch_qkv(q, q.double())

    waybill.torch.run_threads(1, body)


def test_they_say_that_they_go():
    """Where they are called, with what to use."""
    plan = plan_for(1, "per_rank")
    q = torch.zeros(sum(LENGTHS), 1, 4)

    def body(world):
        dispatcher = wt.SequenceDispatcher(world)
        with pytest.warns(DeprecationWarning, match="use ContextParallelAttention.* goes in 0.3"):
            step = wt.AttentionStep(dispatcher, plan.to_routing(), q, q, q)
        text = "use ContextParallelAttention under .*checkpoint; goes in 0.3"
        with pytest.warns(DeprecationWarning, match=text) as caught:
            wt.recomputed_attention(attend, step, step, q, q, q)
        assert [w.filename for w in caught] == [__file__]

    wt.run_threads(1, body)
