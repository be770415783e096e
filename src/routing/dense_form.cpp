#include <algorithm>

#include "dense_checks.h"
#include "homes.h"
#include "waybill/core/error.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

IndexArray dense_counts(const RecvCounts& recv) {
  const std::int64_t world = std::ssize(recv.total);
  IndexArray result({world, world + 1});
  const auto cells = result.i64();
  for (std::int64_t r = 0; r < world; ++r) {
    for (std::int64_t k = recv.offsets[r]; k < recv.offsets[r + 1]; ++k) {
      cells[r * (world + 1) + recv.src_rank[k]] = recv.tokens[k];
    }
    cells[r * (world + 1) + world] = recv.total[r];
  }
  return result;
}

Metadata dense_table(const SparseMetadata& table, bool all_entries) {
  const std::int64_t world = table.world_size;
  const std::int64_t entries = detail::largest_part(table.rank_offsets);
  const bool has_copies = !table.copy_offsets.empty();
  const std::int64_t copies = std::max<std::int64_t>(1, detail::largest_part(table.copy_offsets));
  Shape shape{world, entries};
  if (has_copies) shape.push_back(copies);
  Metadata dense;
  dense.dst_rank = IndexArray::full(shape, -1);
  dense.dst_offset = IndexArray(shape);
  dense.seq_len = IndexArray({world, entries});
  dense.num_seqs = IndexArray({world});
  const auto dst_rank = dense.dst_rank.i64();
  const auto dst_offset = dense.dst_offset.i64();
  const auto seq_len = dense.seq_len.i64();
  const auto num_seqs = dense.num_seqs->i64();
  for (std::int64_t r = 0; r < world; ++r) {
    std::int64_t cell = r * entries;
    for (std::int64_t entry = table.rank_offsets[r]; entry < table.rank_offsets[r + 1];
         ++entry, ++cell) {
      seq_len[cell] = table.seq_len[entry];
      num_seqs[r] += all_entries || table.seq_len[entry] > 0 ? 1 : 0;
      for (std::int64_t c = table.destination_begin(entry); c < table.destination_end(entry); ++c) {
        const std::size_t slot = cell * copies + c - table.destination_begin(entry);
        dst_rank[slot] = table.dst_rank[c];
        dst_offset[slot] = table.dst_offset[c];
      }
    }
  }
  dense.num_recv_tokens = dense_counts(table.recv);
  dense.num_total_recv_tokens = table.recv.total;
  dense.world_size = world;
  return dense;
}

using Flat = UninitializedVector<std::int64_t>;

IndexArray rank_values(const SparseAttnLayout& attn, const Flat& values, std::int32_t rank) {
  const auto first = values.begin() + attn.rank_offsets[rank];
  const auto last = values.begin() + attn.rank_offsets[rank + 1];
  return {Shape{last - first}, std::vector<std::int64_t>(first, last)};
}

IndexArray cumulative(const IndexArray& lengths) {
  IndexArray sums({lengths.size() + 1});
  const auto values = sums.i64();
  for (std::size_t i = 0; i + 1 < values.size(); ++i) values[i + 1] = values[i] + lengths.i64()[i];
  return sums;
}

AttnLayout dense_attention(const SparseAttnLayout& attn, KvLayout kv_layout) {
  const auto world = static_cast<std::int32_t>(attn.max_seqlen_q.size());
  AttnLayout layout;
  layout.max_seqlen_q = IndexArray({world}, attn.max_seqlen_q);
  layout.max_seqlen_kv = IndexArray({world}, attn.max_seqlen_kv);
  layout.num_local_seqs_recv = IndexArray({world});
  for (std::int32_t r = 0; r < world; ++r) {
    const IndexArray kv_len = rank_values(attn, attn.kv_len, r);
    layout.cu_seqlens_q.push_back(cumulative(rank_values(attn, attn.q_len, r)));
    layout.num_local_seqs_recv.i64()[r] = kv_len.size();
    if (kv_layout == KvLayout::per_query) {
      layout.cu_seqlens_kv.push_back(cumulative(kv_len));
    } else {
      layout.kv_row.push_back(rank_values(attn, attn.kv_row, r));
      layout.kv_len.push_back(kv_len);
    }
  }
  return layout;
}

}  // namespace

Metadata to_dense(const SparseMetadata& forward) {
  return dense_table(forward, !forward.copy_offsets.empty());
}

Metadata to_dense_reverse(const SparseMetadata& reverse, const SparseMetadata& forward) {
  require(reverse.world_size == forward.world_size, "to_dense_reverse: reverse has world_size ",
          reverse.world_size, ", expected ", forward.world_size, " as forward");
  if (forward.copy_offsets.empty()) return dense_table(reverse, false);
  const Metadata dense_forward = to_dense(forward);
  Metadata dense = dense_table(reverse, true);
  dense.seq_recv_mask = detail::used_copies(dense_forward.dst_rank);
  dense.recv_seq_lens = dense_forward.seq_len;
  return dense;
}

E2eMetadata to_dense(const QkvRouting& routing) {
  E2eMetadata result;
  result.fwd_q = to_dense(routing.fwd_q);
  result.rev_q = to_dense_reverse(routing.rev_q, routing.fwd_q);
  result.fwd_kv = to_dense(routing.fwd_kv);
  result.rev_kv = to_dense_reverse(routing.rev_kv, routing.fwd_kv);
  result.attention = dense_attention(routing.attention, routing.kv_layout);
  return result;
}

namespace {

constexpr const char* in_to_sparse = "to_sparse";

RecvCounts sparse_counts(const IndexArray& dense) {
  const std::int64_t world = dense.dim(0);
  const Int64View cells(dense);
  RecvCounts result;
  result.offsets.push_back(0);
  for (std::int64_t r = 0; r < world; ++r) {
    for (std::int64_t i = 0; i < world; ++i) {
      const std::int64_t rows = cells[r * (world + 1) + i];
      if (rows == 0) continue;
      result.src_rank.push_back(static_cast<std::int32_t>(i));
      result.tokens.push_back(rows);
    }
    result.offsets.push_back(std::ssize(result.src_rank));
    result.total.push_back(cells[r * (world + 1) + world]);
  }
  return result;
}

/// The values of one rank, appended to a flat table.
void append(UninitializedVector<std::int64_t>& table, const IndexArray& values) {
  const Int64View view(values);
  table.insert(table.end(), view.span().begin(), view.span().end());
}

void check_length(const IndexArray& array, const char* name, std::size_t rank,
                  std::int64_t expected) {
  require(array.ndim() == 1 && array.size() == expected, in_to_sparse, ": attention.", name,
          " of rank ", rank, " has shape ", to_string(array.shape()), ", expected [", expected,
          "]");
}

/// Appends begins and lengths from prefix sums with a leading 0.
void append_sums(const IndexArray& cu_seqlens, UninitializedVector<std::int64_t>& begins,
                 UninitializedVector<std::int64_t>& lengths) {
  const Int64View sums(cu_seqlens);
  for (std::int64_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    begins.push_back(sums[i]);
    lengths.push_back(sums[i + 1] - sums[i]);
  }
}

SparseAttnLayout sparse_attention(const QkvPlan& plan, const AttnLayout& dense) {
  const std::size_t world = plan.world_size;
  const bool per_query = plan.kv_layout == KvLayout::per_query;
  require(dense.cu_seqlens_q.size() == world &&
              (per_query ? dense.cu_seqlens_kv.size() == world
                         : dense.kv_row.size() == world && dense.kv_len.size() == world),
          in_to_sparse, ": attention has ", dense.cu_seqlens_q.size(), " ranks of cu_seqlens_q, ",
          dense.cu_seqlens_kv.size(), " of cu_seqlens_kv, ", dense.kv_row.size(),
          " of kv_row, expected ", world, ", as the KV layout ", to_string(plan.kv_layout),
          " asks for");
  std::vector<std::vector<std::int32_t>> received(world);
  for (std::int32_t s = 0; s < plan.num_shards(); ++s) {
    received[plan.q_dst[s]].push_back(s);
  }
  SparseAttnLayout result;
  result.rank_offsets.push_back(0);
  for (std::size_t r = 0; r < world; ++r) {
    const std::int64_t count = std::ssize(received[r]);
    check_length(dense.cu_seqlens_q[r], "cu_seqlens_q", r, count + 1);
    append_sums(dense.cu_seqlens_q[r], result.q_begin, result.q_len);
    if (per_query) {
      check_length(dense.cu_seqlens_kv[r], "cu_seqlens_kv", r, count + 1);
      append_sums(dense.cu_seqlens_kv[r], result.kv_row, result.kv_len);
    } else {
      check_length(dense.kv_row[r], "kv_row", r, count);
      check_length(dense.kv_len[r], "kv_len", r, count);
      append(result.kv_row, dense.kv_row[r]);
      append(result.kv_len, dense.kv_len[r]);
    }
    result.shard.insert(result.shard.end(), received[r].begin(), received[r].end());
    result.rank_offsets.push_back(std::ssize(result.shard));
  }
  result.max_seqlen_q = dense.max_seqlen_q.to_vector();
  result.max_seqlen_kv = dense.max_seqlen_kv.to_vector();
  return result;
}

}  // namespace

SparseMetadata to_sparse(const Metadata& dense) {
  dense.check_shapes(in_to_sparse);
  require(!dense.is_slice(), in_to_sparse,
          ": got the slice of one rank, expected the metadata of all");
  dense.check_counts(in_to_sparse);
  const std::int64_t world = dense.seq_len.dim(0);
  const std::int64_t per_rank = dense.seq_len.dim(1);
  require(1 <= world && world <= max_world_size, in_to_sparse, ": seq_len has ", world,
          " ranks, expected 1..", max_world_size);
  const Int64View seq_len(dense.seq_len);
  const Int64View dst_rank(dense.dst_rank);
  const Int64View dst_offset(dense.dst_offset);
  for (const std::int64_t rows : seq_len.span())
    require(rows >= 0, in_to_sparse, ": seq_len has ", rows, ", expected >= 0");
  for (const std::int64_t rank : dst_rank.span())
    require(-1 <= rank && rank < world, in_to_sparse, ": dst_rank has ", rank, ", expected -1..",
            world - 1);
  const std::int64_t max_copies = dense.has_copies() ? dense.dst_rank.dim(2) : 1;
  bool one_copy = !dense.has_copies();
  SparseMetadata sparse;
  sparse.world_size = static_cast<std::int32_t>(world);
  sparse.rank_offsets.push_back(0);
  sparse.copy_offsets.push_back(0);
  for (std::int64_t r = 0; r < world; ++r) {
    for (std::int64_t entry = r * per_rank; entry < (r + 1) * per_rank; ++entry) {
      for (std::int64_t c = entry * max_copies; c < (entry + 1) * max_copies; ++c) {
        if (dst_rank[c] < 0) continue;
        sparse.dst_rank.push_back(static_cast<std::int32_t>(dst_rank[c]));
        sparse.dst_offset.push_back(dst_offset[c]);
      }
      const std::int64_t copies = sparse.num_destinations() - sparse.copy_offsets.back();
      if (copies == 0 && seq_len[entry] == 0) continue;
      one_copy = one_copy && copies == 1;
      sparse.seq_len.push_back(seq_len[entry]);
      sparse.copy_offsets.push_back(sparse.num_destinations());
    }
    sparse.rank_offsets.push_back(sparse.num_entries());
  }
  if (one_copy) sparse.copy_offsets.clear();
  sparse.recv = sparse_counts(dense.num_recv_tokens);
  return sparse;
}

QkvRouting to_sparse(const QkvPlan& plan, const E2eMetadata& metadata) {
  plan.check(in_to_sparse);
  QkvRouting routing;
  routing.kv_layout = plan.kv_layout;
  routing.fwd_q = to_sparse(metadata.fwd_q);
  routing.rev_q = to_sparse(metadata.rev_q);
  routing.fwd_kv = to_sparse(metadata.fwd_kv);
  routing.rev_kv = to_sparse(metadata.rev_kv);
  routing.attention = sparse_attention(plan, metadata.attention);
  return routing;
}

}  // namespace waybill
