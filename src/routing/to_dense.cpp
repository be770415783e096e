#include <algorithm>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill {
namespace {

/// Whether num_seqs counts entries without rows: in tables of KV it does (see compute_metadata_kv).
enum class Count { entries_with_rows, all_entries };

std::int64_t most_entries(const SparseMetadata& table) {
  std::int64_t most = 0;
  for (std::int32_t r = 0; r < table.world_size; ++r) {
    most = std::max(most, table.rank_offsets[r + 1] - table.rank_offsets[r]);
  }
  return most;
}

std::int64_t most_copies(const SparseMetadata& table) {
  std::int64_t most = 1;
  for (std::int64_t entry = 0; entry < table.num_entries(); ++entry) {
    most = std::max(most, table.destination_end(entry) - table.destination_begin(entry));
  }
  return most;
}

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

Metadata dense_table(const SparseMetadata& table, Count count) {
  const std::int64_t world = table.world_size;
  const std::int64_t entries = most_entries(table);
  const bool has_copies = !table.copy_offsets.empty();
  const std::int64_t copies = has_copies ? most_copies(table) : 1;
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
      num_seqs[r] += count == Count::all_entries || table.seq_len[entry] > 0 ? 1 : 0;
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

IndexArray used_copies(const IndexArray& dst_rank) {
  IndexArray mask(dst_rank.shape());
  std::transform(dst_rank.i64().begin(), dst_rank.i64().end(), mask.i64().begin(),
                 [](std::int64_t dst) { return dst >= 0 ? 1 : 0; });
  return mask.to(DType::boolean);
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
      layout.kv_begin.push_back(rank_values(attn, attn.kv_begin, r));
      layout.kv_len.push_back(kv_len);
    }
  }
  return layout;
}

}  // namespace

Metadata to_dense(const SparseMetadata& forward) {
  return dense_table(forward,
                     forward.copy_offsets.empty() ? Count::entries_with_rows : Count::all_entries);
}

Metadata to_dense_reverse(const SparseMetadata& reverse, const SparseMetadata& forward) {
  require(reverse.world_size == forward.world_size, "to_dense_reverse: reverse has world_size ",
          reverse.world_size, ", expected ", forward.world_size, " as forward");
  if (forward.copy_offsets.empty()) return dense_table(reverse, Count::entries_with_rows);
  const Metadata dense_forward = to_dense(forward);
  Metadata dense = dense_table(reverse, Count::all_entries);
  dense.seq_recv_mask = used_copies(dense_forward.dst_rank);
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

}  // namespace waybill
