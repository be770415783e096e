"""A first walk with numpy: a few ranks, a few short sequences, every step printed.

    lengths -> rank-to-rank exchange -> copies for context parallelism -> round trip -> debugging

    python examples/python/simple_usage.py

Every claim is checked; the program ends with an AssertionError where one does not hold.
"""

import numpy as np

import waybill

WORLD_SIZE = 3
ROWS = 12  # tokens on every rank
HIDDEN = 4  # elements of a row


def title(text):
    print(f"\n== {text}")


def check(what, ok):
    print(f"  ok  {what}" if ok else f"  FAILED  {what}")
    if not ok:
        raise AssertionError(what)


def numbered_rows(world_size=WORLD_SIZE, rows=ROWS):
    """Rows that say who they are: rank * 100 + row, in every element."""
    ranks, places = np.arange(world_size)[:, None], np.arange(rows)[None, :]
    return np.repeat((ranks * 100 + places)[:, :, None], HIDDEN, axis=2).astype(np.float32)


def print_rows(tensor):
    for rank, rows in enumerate(tensor):
        print(f"  rank {rank}:", *(int(row[0]) for row in rows))


def sequence_lengths():
    title("Sequence lengths: three random sequences a rank, 12 tokens in all")
    seq_len = waybill.gen_seq_lens(WORLD_SIZE, 3, ROWS, seed=7)
    print(f"  {seq_len.tolist()}")
    check("every rank has 12 tokens", (seq_len.sum(axis=1) == ROWS).all())
    check("the same seed gives the same lengths",
          (waybill.gen_seq_lens(WORLD_SIZE, 3, ROWS, seed=7) == seq_len).all())  # fmt: skip
    print(f"  where they begin: {waybill.exclusive_cumsum(seq_len, 1).tolist()}")
    return seq_len


def exchange(seq_len):
    title("Rank-to-rank exchange: the first sequence stays, the others go to the next rank")
    dispatch = np.array([[w] + [(w + 1) % WORLD_SIZE] * 2 for w in range(WORLD_SIZE)])
    fwd, rev = waybill.compute_metadata(seq_len, dispatch)
    print(fwd, end="")
    print("Rows from rank (line) to rank (column):")
    print(fwd.traffic())
    check("what is sent is received", fwd.traffic().sum() == sum(fwd.num_total_recv_tokens))

    q = numbered_rows()
    attention = np.zeros((WORLD_SIZE, max(fwd.num_total_recv_tokens), HIDDEN), q.dtype)
    waybill.orchestrate_simulate(q, attention, fwd)
    print("Before:")
    print_rows(q)
    print("After (rows past a rank's own stay 0):")
    print_rows(attention)
    moved = q[0, seq_len[0, 0] :]  # rank 0's rows but for its first sequence
    check("rank 1's first rows come from rank 0", (attention[1, : len(moved)] == moved).all())
    return q, attention, fwd, rev


def round_trip(q, attention, rev):
    title("Round trip: back home")
    back = np.zeros_like(q)
    waybill.orchestrate_simulate(attention, back, rev)
    check("every row is back where it left, bit for bit", (back == q).all())


def context_parallelism():
    title("Context parallelism: one shard, several destinations")
    seq_len = np.array([[4, 2], [3, 0]])
    # [rank][shard][copy]: the first shard of rank 0 goes to both ranks, the others to one.
    dispatch = np.array([[[0, 1], [1, -1]], [[1, -1], [-1, -1]]])
    fwd, rev = waybill.compute_metadata(seq_len, dispatch)
    print(fwd, end="")
    kv = numbered_rows(2, 6)
    received = waybill.simulate_communication([kv[0], kv[1, :3]], fwd)
    for rank, rows in enumerate(received):
        print(f"  rank {rank} holds:", *(int(row[0]) for row in rows))
    check("both ranks hold shard 0", all((rows[:4] == kv[0, :4]).all() for rows in received))

    title("The way back: each copy returns to a plane of its own, and planes are summed")
    gradients = np.zeros((2, max(fwd.num_total_recv_tokens), HIDDEN), np.float32)
    for rank, rows in enumerate(received):
        gradients[rank, : len(rows)] = rank + 1  # 1 from rank 0, 2 from rank 1
    copies, rows = dispatch.shape[2], seq_len.sum(axis=1).max()
    planes = waybill.orchestrate_simulate(
        gradients, np.zeros((2, copies * rows, HIDDEN), np.float32), rev
    )
    home = waybill.sum_kv_copies(planes[0, : copies * 6], rev, rank=0)
    print("  rank 0's gradient, row by row:", *(int(row[0]) for row in home))
    check("shard 0 got 1 + 2, shard 1 only 2", home[:, 0].tolist() == [3] * 4 + [2] * 2)


def one_rank(fwd):
    title("What rank 1 needs to know, as tables for a device")
    part = fwd.get_slice(1).normalize_dtype()
    print(part, end="")
    print(f"  dst_rank is {part.dst_rank.dtype}, dst_offset is {part.dst_offset.dtype}")
    check("a slice has one line per sequence", part.dst_rank.shape == (3,))


def debugging(fwd, rev):
    title("Debugging: an offset that points past the end")
    broken = waybill.Metadata.from_json(fwd.to_json())  # a copy
    broken.dst_offset[0, 0] += ROWS
    print("The validator:")
    findings = waybill.validate(broken, rev)
    for finding in findings:
        print(f"  {finding}")
    check("one finding names rank 0, shard 0", any(f.rank == f.shard == 0 for f in findings))

    print("The simulation:")
    output = np.zeros((WORLD_SIZE, max(fwd.num_total_recv_tokens), HIDDEN), np.float32)
    message = ""
    try:
        waybill.orchestrate_simulate(numbered_rows(), output, broken)
    except waybill.ShapeMismatch as error:
        message = str(error)
    print(f"  {message}")
    check("it names the place", "source rank 0" in message and "shard 0" in message)
    check("and has written nothing", not output.any())


def main():
    seq_len = sequence_lengths()
    q, attention, fwd, rev = exchange(seq_len)
    round_trip(q, attention, rev)
    context_parallelism()
    one_rank(fwd)
    debugging(fwd, rev)

    title("Q, K and V of a random plan with shards, checked in one call")
    waybill.test_qkv_dispatch(world_size=WORLD_SIZE, num_seqs=3, max_seq_shard=2, num_tokens=64)
    print("  ok  they arrive and come back; it would have raised an AssertionError")
    print("\nAll is well.")


if __name__ == "__main__":
    main()
