"""A slow, obvious model of what the library computes, in plain loops, written from its definition.

GLOBAL ORDER: source rank, shard, copy. Everything that has an order follows it.
"""

from types import SimpleNamespace

import numpy as np
from records import METADATA_FIELDS


def table(**fields):
    """The ten fields of Metadata; those not named are as in a new one."""
    empty = dict.fromkeys(METADATA_FIELDS)
    return SimpleNamespace(**{**empty, "normalized": False, **fields})


def counts_table(pairs, world):
    """(W, W + 1) rows by (receiving rank, sending rank), then their sum; and the sums as a list."""
    counts = np.zeros((world, world + 1), np.int64)
    for receiver, sender, rows in pairs:
        counts[receiver, sender] += rows
        counts[receiver, world] += rows
    return counts, [int(total) for total in counts[:, world]]


def with_copy_axis(dispatch):
    """(W, S, C): a dispatch of two axes has one copy."""
    return dispatch if dispatch.ndim == 3 else dispatch[:, :, None]


def copies_in_global_order(seq_len, dispatch):
    """(rank, shard, copy, destination, rows) of every copy that goes somewhere."""
    world, shards = seq_len.shape
    slots = with_copy_axis(dispatch)
    return [
        (i, j, k, int(slots[i, j, k]), int(seq_len[i, j]))
        for i in range(world)
        for j in range(shards)
        for k in range(slots.shape[2])
        if slots[i, j, k] >= 0
    ]


def send_table(sent, world):
    """Reverse tables (W, R) of lists of (home rank, first row there, rows), one list a rank."""
    most = max(len(lines) for lines in sent)
    dst_rank = np.full((world, most), -1, np.int64)
    dst_offset = np.zeros((world, most), np.int64)
    seq_len = np.zeros((world, most), np.int64)
    for r, lines in enumerate(sent):
        for t, (home, row, rows) in enumerate(lines):
            dst_rank[r, t], dst_offset[r, t], seq_len[r, t] = home, row, rows
    return dst_rank, dst_offset, seq_len


def compute_metadata(seq_len, dispatch):
    """(forward, reverse)"""
    world = len(seq_len)
    copies = copies_in_global_order(seq_len, dispatch)
    has_copies = dispatch.ndim == 3
    dst_offset = np.zeros_like(dispatch)
    filled = [0] * world
    sent_back = [[] for _ in range(world)]
    for i, j, k, r, rows in copies:
        dst_offset[(i, j, k) if has_copies else (i, j)] = filled[r]
        filled[r] += rows
        begin = int(seq_len[i, :j].sum())
        sent_back[r].append((i, k * int(seq_len[i].sum()) + begin, rows))
    recv, totals = counts_table([(r, i, rows) for i, _, _, r, rows in copies], world)
    fwd = table(
        dst_rank=dispatch, dst_offset=dst_offset, seq_len=seq_len, num_recv_tokens=recv,
        num_seqs=(seq_len > 0).sum(axis=1), world_size=world, num_total_recv_tokens=totals,
    )  # fmt: skip
    recv, totals = counts_table([(i, r, rows) for i, _, _, r, rows in copies], world)
    dst_rank, dst_offset, rev_len = send_table(sent_back, world)
    rev = table(
        dst_rank=dst_rank, dst_offset=dst_offset, seq_len=rev_len, num_recv_tokens=recv,
        seq_recv_mask=dispatch >= 0 if has_copies else None,
        recv_seq_lens=seq_len if has_copies else None,
        num_seqs=(rev_len > 0).sum(axis=1), world_size=world, num_total_recv_tokens=totals,
    )  # fmt: skip
    return fwd, rev


def intermediates(seq_len, dispatch):
    """(tokens_to_dst_per_dispatch, seq_to_dst, num_received_seqs)"""
    world, shards = seq_len.shape
    num_copies = dispatch.shape[2] if dispatch.ndim == 3 else 1
    tokens = np.zeros((world, shards, num_copies, world), np.int64)
    one_hot = np.zeros_like(tokens)
    received = np.zeros(world, np.int64)
    for i, j, k, r, rows in copies_in_global_order(seq_len, dispatch):
        tokens[i, j, k, r] = rows
        one_hot[i, j, k, r] = 1
        received[r] += 1
    return tokens, one_hot, received


def compute_metadata_kv(plan):
    """(forward, reverse, kv_dst_global_seq_id) of a plan of ``plans.KvPlan``.

    The buffer of a rank is a group per query, in global order; a group has the KV shards of the
    query's document from its first up to the query.
    """
    world, shards, copies = plan.kv_to_q_rank.shape
    dst_rank = np.full((world, shards, copies), -1, np.int64)
    dst_offset = np.zeros((world, shards, copies), np.int64)
    slot_of = np.full((world, shards, copies), -1, np.int64)
    rows_of_rank = [0] * world
    sent_back = [[] for _ in range(world)]
    pairs = []
    for a, b in plan.shards_in_order():
        r = int(plan.q_dispatch[a, b])
        for w, s in plan.context_of(a, b):
            c = plan.copy_for(w, s, a, b)
            rows = int(plan.seq_len[w, s])
            dst_rank[w, s, c], dst_offset[w, s, c] = r, rows_of_rank[r]
            slot_of[w, s, c] = len(sent_back[r])
            begin = c * int(plan.seq_len[w].sum()) + int(plan.seq_len[w, :s].sum())
            sent_back[r].append((w, begin, rows))
            rows_of_rank[r] += rows
            pairs.append((r, w, rows))
    recv, totals = counts_table(pairs, world)
    fwd = table(
        dst_rank=dst_rank, dst_offset=dst_offset, seq_len=plan.seq_len, num_recv_tokens=recv,
        num_seqs=plan.num_seqs, world_size=world, num_total_recv_tokens=totals,
    )  # fmt: skip
    recv, totals = counts_table([(w, r, rows) for r, w, rows in pairs], world)
    rev_rank, rev_offset, rev_len = send_table(sent_back, world)
    rev = table(
        dst_rank=rev_rank, dst_offset=rev_offset, seq_len=rev_len, num_recv_tokens=recv,
        seq_recv_mask=dst_rank >= 0, recv_seq_lens=plan.seq_len,
        num_seqs=np.array([len(lines) for lines in sent_back]), world_size=world,
        num_total_recv_tokens=totals,
    )  # fmt: skip
    most = rev_rank.shape[1]
    ids = np.where(dst_rank >= 0, dst_rank * most + slot_of, -1)
    return fwd, rev, ids


def attention_layout(seq_len, context, dispatch, prepend_zero, ragged):
    """(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, num_local_seqs_recv)"""
    world = len(seq_len)
    lists = []
    for values in (seq_len, context):
        arrived = [[] for _ in range(world)]
        for i, j, _, r, _ in copies_in_global_order(seq_len, dispatch):
            arrived[r].append(int(values[i, j]))
        lists.append(arrived)
    most = max(map(len, lists[0]))
    sums = []
    for arrived in lists:
        rows = []
        for lens in arrived:
            lens = lens if ragged else lens + [0] * (most - len(lens))
            sum_ = [sum(lens[: t + 1]) for t in range(len(lens))]
            rows.append(np.array(([0] if prepend_zero else []) + sum_, np.int64))
        sums.append(tuple(rows) if ragged else np.stack(rows))
    longest = [np.array([max(lens, default=0) for lens in arrived]) for arrived in lists]
    return (*sums, *longest, np.array([len(lens) for lens in lists[0]]))


def get_slice(m, rank):
    """What moves nothing (no destination, no rows) is left out; the receiving side stays whole."""
    destinations = m.dst_rank[rank]
    goes = destinations >= 0 if destinations.ndim == 1 else (destinations >= 0).any(axis=1)
    keep = goes | (m.seq_len[rank] > 0)
    return table(
        dst_rank=m.dst_rank[rank][keep], dst_offset=m.dst_offset[rank][keep],
        seq_len=m.seq_len[rank][keep], num_recv_tokens=m.num_recv_tokens[rank],
        seq_recv_mask=None if m.seq_recv_mask is None else m.seq_recv_mask[rank],
        recv_seq_lens=None if m.recv_seq_lens is None else m.recv_seq_lens[rank],
        normalized=m.normalized, num_total_recv_tokens=m.num_total_recv_tokens[rank],
    )  # fmt: skip


def normalize_dtype(m):
    """The dtypes of device tables."""
    dtypes = dict.fromkeys(("dst_offset", "seq_len", "seq_recv_mask", "recv_seq_lens"), np.uint32)
    dtypes |= {"dst_rank": np.int32, "num_seqs": np.int32, "num_recv_tokens": np.uint64}
    fields = dict(vars(m), normalized=True)
    for name, dtype in dtypes.items():
        if fields[name] is not None:
            fields[name] = fields[name].astype(dtype)
    return table(**fields)


def moves(m):
    """(source rank, first row, destination, first row there, rows, shard, copy), in order."""
    for i in range(len(m.seq_len)):
        row = 0
        for j, rows in enumerate(m.seq_len[i]):
            destinations = np.atleast_1d(m.dst_rank[i, j])
            for k, (r, at) in enumerate(zip(destinations, np.atleast_1d(m.dst_offset[i, j]))):
                if r >= 0:
                    yield i, row, int(r), int(at), int(rows), j, k
            row += int(rows)


def orchestrate_simulate(tensor, output, m):
    """A new output; of overlapping copies the last wins."""
    result = output.copy()
    for i, row, r, at, rows, _, _ in moves(m):
        result[r, at : at + rows] = tensor[i, row : row + rows]
    return result


def has_overlap(m, num_rows):
    """Whether two copies write one row."""
    writers = np.zeros((len(m.seq_len), num_rows), int)
    for _, _, r, at, rows, _, _ in moves(m):
        writers[r, at : at + rows] += 1
    return bool((writers > 1).any())


def sum_kv_copies(planes, mask, lens):
    """float64: row x is the sum over the used copies c of its shard of row c * T + x."""
    total = int(lens.sum())
    result = np.zeros((total, planes.shape[1]))
    begin = 0
    for shard, rows in enumerate(lens):
        for c in range(mask.shape[1]):
            if mask[shard, c]:
                for x in range(begin, begin + int(rows)):
                    result[x] += planes[c * total + x].astype(np.float64)
        begin += int(rows)
    return result
