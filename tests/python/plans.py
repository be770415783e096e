"""Random dispatches and causal plans for hypothesis."""

import numpy as np
from hypothesis import strategies as st

ranks = st.integers(1, 6)
lengths = st.one_of(st.just(0), st.integers(1, 9), st.integers(1, 300))
#: What dispatches and plans break at; every second one has one of these.
DISPATCH_EDGES = ("rank without tokens", "one rank has all", "one token", "exactly the maximum")
PLAN_EDGES = (*DISPATCH_EDGES, "one document", "documents of one shard", "hardly any tokens")


def edges_of(names):
    return st.one_of(st.none(), st.sampled_from(names))


def holders_of(edge, world, chosen):
    """Ranks that may have tokens."""
    if edge == "rank without tokens":
        return [r for r in range(world) if r != chosen]
    return [chosen] if edge in ("one rank has all", "one token") else list(range(world))


def int_table(rows):
    """An int64 array of nested lists; empty ones keep two axes."""
    array = np.array(rows, np.int64)
    return array if array.ndim > 1 else array.reshape(len(rows), -1)


@st.composite
def dispatches(draw, with_copies=None, every_rank_sends=False):
    """(seq_len, dispatch): padding anywhere, empty ranks, entries of length 0 that go somewhere."""
    world, shards = draw(ranks), draw(st.integers(1 if every_rank_sends else 0, 5))
    if with_copies is None:
        with_copies = draw(st.booleans())
    copies = draw(st.integers(1, 4)) if with_copies else 1
    destination = st.integers(0, draw(st.integers(0, world - 1)))  # the others get nothing
    seq_len = np.zeros((world, shards), np.int64)
    dispatch = np.full((world, shards, copies), -1, np.int64)
    edge = None if every_rank_sends else draw(edges_of(DISPATCH_EDGES))
    holders = holders_of(edge, world, draw(st.integers(0, world - 1)))
    full = edge == "exactly the maximum"
    for i in range(world):
        if not every_rank_sends and not full and draw(st.integers(0, 5)) == 0:
            continue  # a rank with nothing but padding
        for j in range(shards):
            if not every_rank_sends and not full and draw(st.integers(0, 4)) == 0:
                continue
            if i in holders:
                seq_len[i, j] = 300 if full else draw(lengths)
            if edge == "one token":
                seq_len[i, j] = 1 if i in holders and not seq_len.any() else 0
            used = draw(st.lists(st.booleans(), min_size=copies, max_size=copies))
            used[draw(st.integers(0, copies - 1))] = True
            for k in range(copies):
                if used[k]:
                    dispatch[i, j, k] = draw(destination)
    return seq_len, dispatch if with_copies else dispatch[:, :, 0].copy()


class KvPlan:
    """A causal plan in DistCA's dense form. Documents are lists of (rank, shard)."""

    def __init__(self, seq_len, num_seqs, q_dispatch, documents, copies):
        self.seq_len, self.num_seqs, self.q_dispatch = seq_len, num_seqs, q_dispatch
        self.documents = documents
        world, shards = seq_len.shape
        self._place = {at: (d, p) for d, doc in enumerate(documents) for p, at in enumerate(doc)}
        self._copy = {}
        self.kv_to_q_mapping = np.full((world, shards, copies, 2), -1, np.int64)
        self.kv_to_q_rank = np.full((world, shards, copies), -1, np.int64)
        self.kv_context_size = np.zeros((world, shards), np.int64)
        self.q_to_num_kv_seq = np.zeros((world, shards), np.int64)
        self.q_to_num_kv_token = np.zeros((world, shards), np.int64)

    def fill(self, slots_of):
        """``slots_of(shard, number of queries)`` says which copy slots the queries take."""
        for doc in self.documents:
            rows = 0
            for p, at in enumerate(doc):
                self.kv_context_size[at] = rows
                rows += int(self.seq_len[at])
                self.q_to_num_kv_seq[at], self.q_to_num_kv_token[at] = p + 1, rows
                queries = doc[p:]  # causal: those at or after it
                for c, query in zip(slots_of(at, len(queries)), queries):
                    self._copy[at, query] = c
                    self.kv_to_q_mapping[at][c] = query
                    self.kv_to_q_rank[at][c] = p
        return self

    def fill_in_order(self):
        """The c-th query takes copy c, and there are no spare copies."""
        self.kv_to_q_mapping[...] = -1
        self.kv_to_q_rank[...] = -1
        self._copy.clear()
        return self.fill(lambda _, queries: range(queries))

    def tables(self):
        """The arguments of compute_metadata_kv, in order, without the two hints."""
        return (
            self.kv_to_q_mapping, self.kv_to_q_rank, self.kv_context_size, self.q_to_num_kv_seq,
            self.q_to_num_kv_token, self.seq_len, self.num_seqs, self.q_dispatch,
        )  # fmt: skip

    def one_hot(self):
        """q_seq_to_dst"""
        world = len(self.seq_len)
        return (self.q_dispatch[..., None] == np.arange(world)).astype(np.int64)

    def shards_in_order(self):
        return sorted(self._place)

    def context_of(self, rank, shard):
        """The KV shards that a query reads, in document order."""
        document, position = self._place[rank, shard]
        return self.documents[document][: position + 1]

    def copy_for(self, kv_rank, kv_shard, rank, shard):
        return self._copy[(kv_rank, kv_shard), (rank, shard)]


@st.composite
def kv_plans(draw, across_ranks=None, spare_copies=True):
    """Documents that stay on a rank, or that lie across ranks in any order."""
    world = draw(ranks)
    edge = draw(edges_of(PLAN_EDGES))
    holders = holders_of(edge, world, draw(st.integers(0, world - 1)))
    no_shards = draw(st.booleans())  # of ranks without tokens; else shards without tokens
    num_seqs = [
        4 if edge == "exactly the maximum" else 0 if no_shards and w not in holders
        else draw(st.integers(0, 4)) for w in range(world)
    ]  # fmt: skip
    shards = max(num_seqs)
    places = [(w, s) for w in range(world) for s in range(num_seqs[w])]
    if across_ranks is None:
        across_ranks = draw(st.booleans())
    if across_ranks:
        places = draw(st.permutations(places))
    documents = []
    goes_on = {"one document": st.just(True), "documents of one shard": st.just(False)}
    for at in places:
        same_rank = across_ranks or (documents and documents[-1][-1][0] == at[0])
        if documents and draw(goes_on.get(edge, st.booleans())) and same_rank:
            documents[-1].append(at)
        else:
            documents.append([at])
    seq_len = np.zeros((world, shards), np.int64)
    q_dispatch = np.full((world, shards), -1, np.int64)
    for at in places:
        q_dispatch[at] = draw(st.integers(0, world - 1))
        if at[0] not in holders or (edge == "one token" and seq_len.any()):
            continue
        if edge in ("one token", "exactly the maximum"):
            seq_len[at] = 1 if edge == "one token" else 300
        elif edge != "hardly any tokens" or draw(st.integers(0, 4)) == 0:
            seq_len[at] = draw(lengths)
    copies = max([1, *map(len, documents)]) + (draw(st.integers(0, 2)) if spare_copies else 0)
    plan = KvPlan(seq_len, np.array(num_seqs, np.int64), q_dispatch, documents, copies)
    slots = {at: draw(st.permutations(range(copies))) for at in places}
    return plan.fill(lambda at, queries: slots[at][:queries])


def sparse_arguments(plan):
    """The same plan as arguments of QkvPlan: its documents by numbers of shards."""
    number = {at: n for n, at in enumerate(plan.shards_in_order())}
    shards = list(number)
    return {
        "world_size": len(plan.seq_len),
        "rank_shard_offsets": np.concatenate([[0], np.cumsum(plan.num_seqs)]),
        "shard_len": [int(plan.seq_len[at]) for at in shards],
        "q_dst": [int(plan.q_dispatch[at]) for at in shards],
        "doc_shard_offsets": np.concatenate(
            [[0], np.cumsum([len(d) for d in plan.documents])]
        ).astype(int),
        "doc_shards": [number[at] for document in plan.documents for at in document],
    }
