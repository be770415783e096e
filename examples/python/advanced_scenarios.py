"""Five scenes from real use, with numpy; each checks what it shows.

    1 large-scale deployment      4 damaged metadata
    2 heterogeneous lengths       5 performance
    3 too little memory

    python examples/python/advanced_scenarios.py

Ends with an AssertionError where a claim does not hold. Times are printed, not claimed.
"""

import heapq
import statistics
import time

import numpy as np

import waybill

Q_ROW_BYTES, KV_ROW_BYTES = 8192, 4096  # of one token, as in a model of today


def scene(text):
    print(f"\n== {text}")


def check(what, ok):
    print(f"  ok  {what}" if ok else f"  FAILED  {what}")
    if not ok:
        raise AssertionError(what)


def pack(lengths, world_size, rows_per_rank, shard_tokens, kv_layout="per_rank"):
    """A plan that lays documents end to end over the ranks and leaves every shard at home."""
    shard_len, doc_offsets, rank_offsets = [], [0], [0]
    at = 0
    for length in lengths:
        end = at + int(length)
        while at < end:
            border = (at // rows_per_rank + 1) * rows_per_rank
            size = min(end - at, shard_tokens, border - at)
            shard_len.append(size)
            at += size
            if at == border:
                rank_offsets.append(len(shard_len))
        doc_offsets.append(len(shard_len))
    rank_offsets += [len(shard_len)] * (world_size + 1 - len(rank_offsets))
    homes = np.repeat(np.arange(world_size), np.diff(rank_offsets))
    return waybill.QkvPlan(
        world_size, rank_offsets, shard_len, homes, doc_offsets, range(len(shard_len)),
        kv_layout=kv_layout,
    )  # fmt: skip


def reassign(plan, q_dst, kv_layout=None, kv_begin=None):
    """The same shards and documents with other attending ranks."""
    return waybill.QkvPlan(
        plan.world_size, plan.rank_shard_offsets, plan.shard_len, q_dst, plan.doc_shard_offsets,
        plan.doc_shards, kv_begin, kv_layout or plan.kv_layout,
    )  # fmt: skip


def balance(plan):
    """Most work first: stay at home while home is below the mean, else go to the idlest rank."""
    q_dst, work = plan.q_dst.copy(), plan.shard_work
    mean = work.sum() / plan.world_size
    load = [0] * plan.world_size
    idlest = [(0, rank) for rank in range(plan.world_size)]
    for shard in np.argsort(-work, kind="stable"):
        rank = int(q_dst[shard])
        if load[rank] + work[shard] > mean:
            while idlest[0][0] != load[idlest[0][1]]:  # out of date
                heapq.heappop(idlest)
            rank = idlest[0][1]
        load[rank] += int(work[shard])
        heapq.heappush(idlest, (load[rank], rank))
        q_dst[shard] = rank
    return reassign(plan, q_dst)


def wire_bytes(plan):
    """Bytes that leave their rank, forward."""
    q, kv = (rows.sum() - rows.trace() for rows in plan.traffic())
    return int(q) * Q_ROW_BYTES + int(kv) * KV_ROW_BYTES


def large_scale():
    scene("1  Large-scale deployment: 64 ranks, two million tokens of documents as they occur")
    world_size, rows = 64, 32 * 1024
    lengths = waybill.sample_documents("wlbllm", world_size * rows, seed=11)
    at_home = pack(lengths, world_size, rows, shard_tokens=1024)
    plan = balance(at_home)
    print(f"  {plan.num_documents} documents in {plan.num_shards} shards, longest {lengths.max()}")
    before, after = at_home.imbalance, plan.imbalance
    print(f"  largest over mean work: at home {before:.2f}, planned {after:.2f}")
    print(f"  on the wire, forward: {wire_bytes(plan) / 2**30:.1f} GiB")
    check("planned, no rank has 5 % more than the mean", plan.imbalance < 1.05)

    begin = time.perf_counter()
    step = plan.to_metadata()
    print(f"  metadata of all ranks in {1e3 * (time.perf_counter() - begin):.1f} ms")
    check("the validator finds nothing", waybill.validate(plan, step) == [])
    check("every query row is attended to once", sum(step.fwd_q.num_total_recv_tokens) == 64 * rows)

    part = step.fwd_kv.get_slice(17).normalize_dtype()
    num_lines, num_copies = part.dst_rank.shape
    print(f"  rank 17 sends {num_lines} shards of KV, up to {num_copies} copies")
    check("slices of a few KB go to the devices", part.dst_offset.nbytes < 64 * 1024)
    print("\n".join(plan.summary(Q_ROW_BYTES, KV_ROW_BYTES, gb_per_s=50).split("\n")[-12:]))


def heterogeneous_lengths():
    scene("2  Heterogeneous lengths: one sequence of 65536 tokens; 16 of 4096 on each other rank")
    world_size = 4
    n = 16
    seq_lens = np.zeros((world_size, n), np.int64)
    seq_lens[0, 0] = 65536
    seq_lens[1:, :n] = 4096
    cp_num = (seq_lens > 0).astype(np.int64)
    cp_dst = np.full((world_size, n, 8), -1)
    cp_dst[1:, :, 0] = np.arange(1, world_size)[:, None]
    shard_lens = np.zeros_like(cp_dst)
    shard_lens[:, :, 0] = seq_lens

    def attended(num, dst, lens):
        cp_num[0, 0], cp_dst[0, 0, :num], shard_lens[0, 0, :num] = num, dst, lens
        result = waybill.create_qkv_dispatch_with_custom_mapping(
            world_size, seq_lens, cp_num, cp_dst, shard_lens
        )
        check("the validator finds nothing", waybill.validate(*result) == [])
        return pairs_by_rank(result[4])

    whole = attended(1, [0], [65536])
    folded = attended(8, [0, 1, 2, 3, 3, 2, 1, 0], [8192] * 8)
    print(f"  (query, key) pairs by rank, in millions: whole  {(whole / 1e6).round().tolist()}")
    print(f"                                           folded {(folded / 1e6).round().tolist()}")
    check("the fold loses no pair", whole.sum() == folded.sum())
    check("whole, rank 0 has more than three times the mean", whole.max() > 3 * whole.mean())
    check("folded, no rank has 15 % more than the mean", folded.max() < 1.15 * folded.mean())

    # Uneven shards: later rows meet longer contexts, so later shards are shorter.
    bounds = np.round(65536 * np.sqrt(np.arange(5) / 4)).astype(np.int64)
    shards = np.diff(bounds)
    uneven = waybill.QkvPlan(4, [0, 4, 4, 4, 4], shards, range(4), [0, 4], range(4)).work
    print(f"  uneven shards of {shards.tolist()} rows: {(uneven / 1e6).round().tolist()}")
    check("cut at square roots, all have the same work", uneven.max() < 1.001 * uneven.mean())


def pairs_by_rank(attention):
    """Causal (query, key) pairs that each rank computes, from its attention layout alone."""
    pairs = []
    for cu_q, cu_kv in zip(attention.cu_seqlens_q, attention.cu_seqlens_kv):
        q, kv = np.diff(cu_q), np.diff(cu_kv)
        pairs.append((q * kv - q * (q - 1) // 2).sum())
    return np.array(pairs)


def too_little_memory():
    scene("3  Too little memory: what fits into the KV buffer of a rank?")
    lengths = [200_000, 40_000, 22_144]
    planned = balance(pack(lengths, 8, 32768, shard_tokens=2048))
    shards_before = np.arange(planned.num_shards) - np.repeat(
        planned.doc_shard_offsets[:-1], np.diff(planned.doc_shard_offsets)
    )
    window = np.maximum(shards_before - 8, 0)  # a shard and the eight before it
    rows = {}
    for label, plan in (
        ("KV once per query", reassign(planned, planned.q_dst, "per_query")),
        ("KV once per rank", planned),
        ("a sliding window", reassign(planned, planned.q_dst, kv_begin=window)),
    ):
        step = plan.to_metadata()
        rows[label] = max(step.fwd_kv.num_total_recv_tokens)
        gib = rows[label] * KV_ROW_BYTES / 2**30
        print(f"  {label:17}: the fullest rank holds {rows[label]:>9,} rows, {gib:.2f} GiB")
        check("a buffer of so many rows is enough",
              waybill.validate(plan, step, kv_capacity=rows[label]) == [])  # fmt: skip
        findings = waybill.validate(plan, step, kv_capacity=rows[label] - 1)
        check("one row less is not", {finding.kind for finding in findings} == {"capacity"})
    print(f"  {findings[0]}")
    once_a_query, once_a_rank, windowed = rows.values()
    check("each needs less than the one before", once_a_query > once_a_rank > windowed)


def damaged_metadata():
    scene("4  Damaged metadata, and what the validator says")
    plan = balance(pack([9000, 700, 4100, 2584], 4, 4096, shard_tokens=512))
    sound = plan.to_metadata()
    check("it finds nothing in sound tables", waybill.validate(plan, sound) == [])

    def plant(what, damage):
        broken = plan.to_metadata()
        damage(broken)
        findings = waybill.validate(plan, broken, max_findings=3)
        check(f"{what}: found", findings != [])
        print(f"      {findings[0]}")

    def swap_return_addresses(step):
        step.rev_q.dst_offset[1, [0, 1]] = step.rev_q.dst_offset[1, [1, 0]]

    def lose_a_rank(step):
        step.fwd_kv.dst_rank[step.fwd_kv.dst_rank == 2] = -1

    def cut_a_table(step):
        step.fwd_kv.dst_offset = step.fwd_kv.dst_offset[:, :-1]

    def bytes_for_tokens(step):
        step.fwd_q.dst_offset *= Q_ROW_BYTES

    def flip_a_bit(step):
        step.fwd_kv.seq_len[0, 0] ^= 1 << 20

    def miscount(step):
        step.rev_kv.num_recv_tokens[3, 0] -= 1

    plant("two return addresses change places", swap_return_addresses)
    plant("rank 2 is gone", lose_a_rank)
    plant("a table is cut short", cut_a_table)
    plant("offsets in bytes", bytes_for_tokens)
    plant("a bit flips in a length", flip_a_bit)
    plant("a count that does not match", miscount)

    text = sound.fwd_q.to_json()
    try:
        waybill.Metadata.from_json(text[: len(text) // 2])
        truncated = ""
    except waybill.IoError as error:
        truncated = str(error)
    check("a truncated file is refused, with line and column", "line" in truncated)
    print(f"      {truncated[:90]}...")


def median_ms(action, repeats=5):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def performance():
    scene("5  Performance: verified first, then timed; medians of five")
    for world_size in (8, 64, 512):
        seq_len = waybill.gen_seq_lens(world_size, 20, 65536, seed=1)
        dispatch = np.random.default_rng(1).integers(0, world_size, seq_len.shape)
        fwd, rev = waybill.compute_metadata(seq_len, dispatch)
        if waybill.validate(fwd, rev):
            raise AssertionError("a wrong result has no speed")
        ms = median_ms(lambda s=seq_len, d=dispatch: waybill.compute_metadata(s, d))
        print(f"  compute_metadata, {world_size:3} ranks of 20 sequences: {ms:8.3f} ms")

    seq_len = waybill.gen_seq_lens(8, 16, 4096, seed=2)
    dispatch = np.random.default_rng(2).integers(0, 8, seq_len.shape)
    fwd, rev = waybill.compute_metadata(seq_len, dispatch)
    q = np.random.default_rng(3).random((8, 4096, 512), np.float32)
    one = np.zeros((8, max(fwd.num_total_recv_tokens), 512), np.float32)
    every = np.zeros_like(one)
    waybill.orchestrate_simulate(q, one, fwd, num_threads=1)
    waybill.orchestrate_simulate(q, every, fwd, num_threads=0)
    check("one thread and all of them give the same bytes", one.tobytes() == every.tobytes())
    move = median_ms(lambda: waybill.orchestrate_simulate(q, every, fwd))
    copy_to = np.zeros_like(q)
    copy = median_ms(lambda: np.copyto(copy_to, q))
    print(f"  moving {q.nbytes >> 20} MiB: {move:.1f} ms, {q.nbytes / move / 1e6:.1f} GB/s;"
          f" numpy's copy of as much: {copy:.1f} ms")  # fmt: skip


def main():
    large_scale()
    heterogeneous_lengths()
    too_little_memory()
    damaged_metadata()
    performance()
    print("\nAll is well.")


if __name__ == "__main__":
    main()
