"""Kernels of a user, which may give anything: what is wrong is named, nothing is taken silently."""

import pytest
from error_texts import lies_on
from packed import attention, close, leaves_of, module, pieces_in_order, tensors_of, whole

import waybill

torch = pytest.importorskip("torch")
wt = pytest.importorskip("waybill.torch")

PIECES = pieces_in_order([70, 9, 33], 2)


def right(q, k, v, sequences, shape):
    """(output, log-sum-exp in float64)"""
    outs, lses = [], []
    for q_, k_, v_ in zip(
        q.split(sequences.q_lens), k.split(sequences.k_lens), v.split(sequences.k_lens)
    ):
        before = len(k_) - len(q_)
        longer = torch.cat([q_.new_zeros(before, *q_.shape[1:]), q_])
        out, lse = attention(longer, k_, v_, shape.mask, shape.window, shape.scale)
        outs.append(out[before:])
        lses.append(lse[before:])
    return torch.cat(outs), torch.cat(lses).t()


def out_of(change):
    return lambda *given: change(right(*given)[0])


OUTPUTS = {
    "another dtype": (out_of(lambda t: t.float()), "dtype torch.float32, expected torch.float64"),
    "a row more": (out_of(lambda t: torch.cat([t, t[:1]])), "has shape"),
    "one row": (out_of(lambda t: t[:1]), r"has shape \[1, 2, 8\], expected"),
    "one number": (out_of(lambda t: t[:1, :1, :1]), r"has shape \[1, 1, 1\], expected"),
    "no axes": (out_of(lambda t: t.sum()), r"has shape \[\], expected"),
    "flat rows": (out_of(lambda t: t.flatten(1)), "has shape"),
    "heads first": (out_of(lambda t: t.transpose(0, 1)), "has shape"),
    "elsewhere": (out_of(lambda t: t.to("meta")), lies_on("", "meta", "cpu")),
    "numpy": (out_of(lambda t: t.detach().numpy()), "is a ndarray, expected a tensor"),
    "nothing": (out_of(lambda t: None), "is None, expected a tensor"),
    "three": (lambda *given: (*right(*given), 1), "returned 3 results"),
}


def refused(kernel, message, return_lse=False, backward=False, in_place=True):
    tensors = tensors_of(PIECES, 2, 1, 8, 8)

    def body(world):
        attend = module(world, kernel=kernel, in_place=in_place)
        inputs = leaves_of(tensors[world.rank])
        if backward:
            out = attend(attend.plan(PIECES), *inputs)
            with pytest.raises(waybill.Error, match=message) as error:
                out.sum().backward()
        else:
            with pytest.raises(waybill.Error, match=message) as error:
                attend(attend.plan(PIECES), *inputs, return_lse=return_lse)
        return str(error.value)

    texts = wt.run_threads(2, body, timeout_s=20)
    assert all("kernel" in text for text in texts)
    return texts


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name, in_place):
    kernel, message = OUTPUTS[name]
    for rank, text in enumerate(refused(kernel, message, in_place=in_place)):
        assert f"on rank {rank}" in text or name == "three"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lse: lse.t(), r"log-sum-exp has shape \[\d+, 2\], expected \[2, "),
        (lambda lse: lse[:, :1], r"log-sum-exp has shape \[2, 1\]"),
        (lambda lse: lse.sum(), r"log-sum-exp has shape \[\]"),
        (lambda lse: "x", "log-sum-exp is 'x'"),
    ],
)
def test_log_sum_exps(change, message):
    def kernel(*given):
        out, lse = right(*given)
        return out, change(lse)

    refused(kernel, message, return_lse=True)


def test_a_wide_log_sum_exp_is_taken():
    tensors = tensors_of(PIECES, 2, 1, 8, 8)

    def body(world):
        attend = module(world, kernel=right)
        out, lse = attend(attend.plan(PIECES), *tensors[world.rank][:3], return_lse=True)
        assert lse.dtype == torch.float32
        return out, lse.double()

    for got, (out, _, _, _, lse) in zip(wt.run_threads(2, body), whole(PIECES, tensors)):
        close(got[:1], [out])
        close(got[1:], [lse], 1e-6)


class Mine(wt.kernels.AttentionKernel):
    """Gradients as ``change`` has them."""

    def __init__(self, change):
        self.change = change

    def forward(self, q, k, v, sequences, shape, want_lse):
        return right(q, k, v, sequences, shape)

    def backward(self, *given):
        return self.change(*super().backward(*given))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda dq, dk, dv: (dq, dk), "backward returned 2 results"),
        (lambda dq, dk, dv: dq, "backward returned a Tensor"),
        (lambda dq, dk, dv: (None, dk, dv), "gradient of q is None"),
        (lambda dq, dk, dv: (dq, dk[:1], dv), r"gradient of k has shape \[1, 1, 8\]"),
        (lambda dq, dk, dv: (dq, dk, dv.float()), "gradient of v has dtype torch.float32"),
    ],
)
def test_gradients(change, message, in_place):
    refused(Mine(change), message, backward=True, in_place=in_place)


@pytest.mark.parametrize("in_place", [True, False])
def test_results_in_memory_of_another(in_place):
    """An output that is q, one gradient for two, one number for all: none is written to."""
    pieces = pieces_in_order([70, 9, 33], 2)
    tensors = tensors_of(pieces, 2, 1, 8, 8)

    class Shared(Mine):
        def forward(self, q, k, v, sequences, shape, want_lse):
            return q, None

        def backward(self, grad, q, k, v, *_):
            return grad, k.new_ones(1, 1, 1).expand_as(k), k.new_ones(1, 1, 1).expand_as(v)

    class Twice(Shared):
        def backward(self, grad, q, k, v, *_):
            ones = torch.ones_like(k)
            return grad, ones, ones

    def body(world, kernel):
        attend = module(world, kernel=kernel, in_place=in_place)
        plan = attend.plan(pieces)
        q, k, v = leaves_of(tensors[world.rank])
        before = q.detach().clone()
        out = attend(plan, q, k, v)
        out.backward(tensors[world.rank][3])
        assert torch.equal(q, before) and torch.equal(out, before)
        assert torch.equal(q.grad, tensors[world.rank][3])
        return k.grad, v.grad

    first = wt.run_threads(2, lambda world: body(world, Shared(None)))
    second = wt.run_threads(2, lambda world: body(world, Twice(None)))
    for got, expected in zip(second, first):
        close(got, expected)
        close(got[:1], got[1:])  # each sum once


def test_what_autograd_does_not_know():
    """No gradient would be all zeros, silently."""
    refused(out_of(lambda t: t.detach()), "autograd does not know", backward=True)

    class Empty(wt.kernels.AttentionKernel):
        pass

    refused(Empty(), "has no forward")


def test_flex_has_no_gradients_on_the_cpu():
    """Said before anything is computed, not in backward."""

    def body(world):
        attend = module(world, kernel="flex", dtype=torch.float32)
        plan = attend.plan([[5], [5]])
        rows = [torch.ones(5, n, 8, requires_grad=True) for n in (2, 1, 1)]
        for given in (plan, attend.ticket(plan)):
            with pytest.raises(waybill.Unsupported, match='kernel "flex" has none on the CPU'):
                attend(given, *rows)

    wt.run_threads(2, body)


class KnownGradient(torch.autograd.Function):
    """Zeros, whose gradient of each key is a number."""

    @staticmethod
    def forward(ctx, q, k, v, of_keys):
        ctx.save_for_backward(q, k, v)
        ctx.of_keys = of_keys
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        return torch.zeros_like(q), torch.full_like(k, ctx.of_keys), torch.zeros_like(v), None


def test_what_stayed_and_what_came_back_are_rounded_once():
    """1 and twice 2^-8, half of the last bit of bfloat16: each rounded alone, they would be 1."""
    pieces = pieces_in_order([96], 3)
    tensors = tensors_of(pieces, 2, 1, 8, 8, dtype=torch.bfloat16)

    def body(world):
        of_keys = {0: 2.0**-8, 1: 1.0, 2: 2.0**-8}[world.rank]

        def kernel(q, k, v, sequences, shape):
            # Rank 0 attends to its rows in place, and with others' to copies of them.
            is_copy = world.rank == 0 and len(k) > 32
            return KnownGradient.apply(q, k, v, 0.0 if is_copy else of_keys)

        attend = module(world, kernel=kernel, dtype=torch.bfloat16)
        q, k, v = leaves_of(tensors[world.rank])
        attend(attend.plan(pieces), q, k, v).sum().backward()
        return k.grad[0, 0, 0].item()

    assert wt.run_threads(3, body)[0] == 1 + 2.0**-7
