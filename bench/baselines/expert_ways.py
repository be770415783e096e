"""Ways to take tokens to experts and back, with the same calls: those to compare.

Each has ``dispatch()`` from tokens, ids and weights alone; ``dispatch_again()`` of the same
routing, which may use all that the first one learnt; and ``combine()`` of what arrived, a row a
token and rank. ``combined()`` is the last sum, [T, hidden].
"""

import torch
import torch.distributed as dist


class Case:
    """The tokens of a rank: small whole numbers, of which every sum is exact in bfloat16.

    ids [T, topk] are distinct experts, all as likely.
    """

    def __init__(self, rank, world_size, device, tokens, hidden, topk, experts, num_sm):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randint(0, 16, (tokens, hidden), generator=generator, dtype=torch.uint8)
        scores = torch.rand(tokens, experts, generator=generator)
        self.rank, self.world_size, self.device = rank, world_size, device
        self.hidden, self.topk, self.experts, self.num_sm = hidden, topk, experts, num_sm
        self.x = values.to(device).bfloat16()
        self.ids = scores.topk(topk).indices.to(device)
        self.weights = torch.rand(tokens, topk, generator=generator).to(device)
        ranks = self.ids // (experts // world_size)
        self.goes = torch.zeros(tokens, world_size, dtype=torch.bool, device=device)
        self.goes.scatter_(1, ranks, True)  # to which ranks a token goes

    def wire_bytes(self):
        """Of rows that leave this rank, each once per destination."""
        away = self.goes.sum().item() - self.goes[:, self.rank].sum().item()
        return int(away) * self.hidden * 2

    def is_sum(self, combined):
        """Whether each token came back once from every rank that it went to."""
        return torch.equal(combined.float(), self.x.float() * self.goes.sum(1, keepdim=True))


class Waybill:
    """EPAll2AllLayer with compact rows, as views of its buffer."""

    name = "waybill"

    def __init__(self, case, group):
        from waybill.torch.moe import EPAll2AllLayer

        self.case = case
        self.layer = EPAll2AllLayer(
            group, max(1, len(case.x)), case.hidden, case.topk, case.rank, case.experts,
            case.world_size, case.world_size, num_sm=case.num_sm, rows="compact", copy_out=False,
            device=case.device,
        )  # fmt: skip

    def dispatch(self):
        case = self.case
        with torch.no_grad():
            self.rows, _, self.layout = self.layer.dispatch(case.x, case.ids, case.weights)

    def dispatch_again(self):
        with torch.no_grad():
            self.rows, _, _ = self.layer.dispatch(
                self.case.x, self.case.ids, layout_desc=self.layout
            )

    def combine(self):
        with torch.no_grad():
            self.sums = self.layer.combine(self.rows, self.layout)

    def combined(self):
        return self.sums

    def close(self):
        self.layer.finalize()


class AllToAll:
    """torch.distributed's all_to_all_single: NCCL, or gloo on the CPU.

    Rows are packed by destination; how many come is said first, which the host waits for.
    """

    name = "all_to_all"

    def __init__(self, case, group):
        self.case, self.group = case, group

    def dispatch(self):
        case = self.case
        self.order = case.goes.t().nonzero()[:, 1]  # tokens, by destination
        counts = case.goes.sum(0)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        self.sends, self.receives = counts.tolist(), arriving.tolist()
        self.ids = self._exchange(case.ids.index_select(0, self.order))
        self.weights = self._exchange(case.weights.index_select(0, self.order))
        self.dispatch_again()

    def dispatch_again(self):
        self.rows = self._exchange(self.case.x.index_select(0, self.order))

    def combine(self):
        back = self.rows.new_empty(len(self.order), self.case.hidden)
        dist.all_to_all_single(back, self.rows, self.sends, self.receives, group=self.group)
        self.sums = torch.zeros(self.case.x.shape, dtype=torch.float32, device=self.case.device)
        # Rank by rank, so that no two rows of a call go to the same token, and the order is fixed.
        for order, rows in zip(self.order.split(self.sends), back.split(self.sends), strict=True):
            self.sums.index_add_(0, order, rows.float())
        self.sums = self.sums.bfloat16()

    def combined(self):
        return self.sums

    def close(self):
        pass

    def _exchange(self, packed):
        come = packed.new_empty(sum(self.receives), *packed.shape[1:])
        dist.all_to_all_single(come, packed, self.receives, self.sends, group=self.group)
        return come


class DeepEP:
    """deep_ep.Buffer on one node, with its recommended configurations, where it is installed."""

    name = "deepep"

    def __init__(self, case, group):
        import deep_ep  # ModuleNotFoundError: it is not there

        deep_ep.Buffer.set_num_sms(case.num_sm // 2 * 2)
        self.case = case
        configs = (
            deep_ep.Buffer.get_dispatch_config(case.world_size),
            deep_ep.Buffer.get_combine_config(case.world_size),
        )
        row_bytes = case.hidden * case.x.element_size()
        sizes = [c.get_nvl_buffer_size_hint(row_bytes, case.world_size) for c in configs]
        self.buffer = deep_ep.Buffer(group, max(sizes))

    def dispatch(self):
        case = self.case
        per_rank, _, per_expert, goes, _ = self.buffer.get_dispatch_layout(case.ids, case.experts)
        self.rows, _, _, _, self.handle, _ = self.buffer.dispatch(
            case.x, num_tokens_per_rank=per_rank, is_token_in_rank=goes,
            num_tokens_per_expert=per_expert, topk_idx=case.ids, topk_weights=case.weights,
        )  # fmt: skip

    def dispatch_again(self):
        self.rows = self.buffer.dispatch(self.case.x, handle=self.handle)[0]

    def combine(self):
        self.sums = self.buffer.combine(self.rows, self.handle)[0]

    def combined(self):
        return self.sums

    def close(self):
        pass


WAYS = {way.name: way for way in (Waybill, AllToAll, DeepEP)}
