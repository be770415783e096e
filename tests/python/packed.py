"""Random packed batches over ranks, and attention of their documents in one process."""

import random

import pytest

torch = pytest.importorskip("torch")
ContextParallelAttention = pytest.importorskip("waybill.torch").ContextParallelAttention

torch.set_num_threads(1)  # ranks are threads, of few rows each


def pieces_in_order(lengths, world_size):
    """Documents packed in order, cut where a rank is full."""
    total = sum(lengths)
    ends = [total * (r + 1) // world_size for r in range(world_size)]
    ranks, at, rank = [[] for _ in range(world_size)], 0, 0
    for document, length in enumerate(lengths):
        offset = 0
        while offset < length:
            while at == ends[rank]:
                rank += 1
            rows = min(length - offset, ends[rank] - at)
            ranks[rank].append((document, offset, rows))
            offset, at = offset + rows, at + rows
    return ranks


def pieces_zigzag(lengths, world_size):
    """Each document in 2 W pieces, of which a rank holds the i-th and the i-th from the end."""
    ranks = [[] for _ in range(world_size)]
    for document, length in enumerate(lengths):
        cuts = [length * i // (2 * world_size) for i in range(2 * world_size + 1)]
        for rank in range(world_size):
            for i in (rank, 2 * world_size - 1 - rank):
                if cuts[i] < cuts[i + 1]:
                    ranks[rank].append((document, cuts[i], cuts[i + 1] - cuts[i]))
    return ranks


def pieces_scattered(lengths, world_size, rng):
    """Cut anywhere, held by anybody, in any order."""
    ranks = [[] for _ in range(world_size)]
    for document, length in enumerate(lengths):
        offset = 0
        while offset < length:
            rows = min(length - offset, rng.randint(1, 40))
            ranks[rng.randrange(world_size)].append((document, offset, rows))
            offset += rows
    for held in ranks:
        rng.shuffle(held)
    return ranks


def pieces_whole(lengths, world_size, rng):
    """Whole documents by number, on one rank each."""
    ranks = [[] for _ in range(world_size)]
    for document, length in enumerate(lengths):
        ranks[rng.randrange(world_size)].append((document, 0, length))
    return ranks


def random_pieces(rng, world_size):
    lengths = [rng.choice((1, 3, 17, 40, 90)) for _ in range(rng.randint(1, 7))]
    kind = rng.choice(("order", "zigzag", "scattered", "whole", "whole"))
    if kind == "order":
        return pieces_in_order(lengths, world_size)
    if kind == "zigzag":
        return pieces_zigzag(lengths, world_size)
    if kind == "whole":
        return pieces_whole(lengths, world_size, rng)
    return pieces_scattered(lengths, world_size, rng)


def attention(q, k, v, mask="causal", window=None, scale=None):
    """Of one document, in plain operations: (output, log-sum-exp [rows, heads])."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask == "causal":
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0) | (distance >= (window or len(q)))
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).t()


def tensors_of(pieces, heads, kv_heads, head_dim, v_head_dim, seed=0, dtype=torch.float64):
    """q, k, v and weights of the output for each rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads, v_head_dim))
    ranks = []
    for held in pieces:
        rows = sum(length for _, _, length in held)
        draw = [torch.randn(rows, *s, dtype=torch.float64, generator=generator) for s in shapes]
        ranks.append([t.to(dtype) for t in draw])
    return ranks


def whole(pieces, tensors, **options):
    """Output, gradients of q, k and v, log-sum-exp: of each rank's rows, from whole documents."""
    leaves = [[t.detach().clone().requires_grad_() for t in ranks[:3]] for ranks in tensors]
    where = {}  # of each document: (offset, rank, row, rows)
    for rank, held in enumerate(pieces):
        row = 0
        for document, offset, rows in held:
            where.setdefault(document, []).append((offset, rank, row, rows))
            row += rows
    outs = [torch.zeros_like(ranks[3]) for ranks in tensors]
    lses = [torch.zeros(ranks[3].shape[:2], dtype=torch.float64) for ranks in tensors]
    for parts in where.values():
        parts.sort()
        joined = [
            torch.cat([leaves[rank][i][row : row + rows] for _, rank, row, rows in parts])
            for i in range(3)
        ]
        out, lse = attention(*joined, **options)
        for (_, rank, row, rows), part, part_lse in zip(
            parts, out.split([p[3] for p in parts]), lse.split([p[3] for p in parts])
        ):
            outs[rank] = outs[rank].index_copy(0, torch.arange(row, row + rows), part)
            lses[rank][row : row + rows] = part_lse.detach()
    sum((out * ranks[3]).sum() for out, ranks in zip(outs, tensors)).backward()
    return [
        (out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in mine), lse)
        for out, mine, lse in zip(outs, leaves, lses)
    ]


def module(world, heads=2, kv_heads=1, head_dim=8, v_head_dim=None, **options):
    """In float64, of small blocks, that attends in place."""
    given = {"dtype": torch.float64, "block_tokens": 4, "in_place": True, **options}
    return ContextParallelAttention(world, heads, kv_heads, head_dim, v_head_dim, **given)


def leaves_of(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors[:3]]


def close(got, expected, tolerance=1e-11):
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def rng_of(seed):
    return random.Random(seed)
