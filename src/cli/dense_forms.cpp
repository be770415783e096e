// Between the dense metadata of files and the sparse form.

#include <algorithm>

#include "dispatch_file.h"
#include "waybill/core/error.h"

namespace waybill::cli {
namespace {

std::size_t at(std::int64_t idx) { return static_cast<std::size_t>(idx); }

// One copy that arrives somewhere.
struct Arrival {
  std::int64_t offset = 0;  // in the destination's buffer
  std::int64_t src = 0;
  std::int64_t home_row = 0;  // copy * T + begin
  std::int64_t rows = 0;
};

std::vector<std::vector<Arrival>> arrivals(const Metadata& forward) {
  const std::int64_t world = forward.seq_len.dim(0);
  const std::int64_t shards = forward.seq_len.dim(1);
  const std::int64_t copies = forward.has_copies() ? forward.dst_rank.dim(2) : 1;
  const Int64View lens(forward.seq_len);
  const Int64View ranks(forward.dst_rank);
  const Int64View offsets(forward.dst_offset);
  std::vector<std::vector<Arrival>> result(at(world));
  for (std::int64_t w = 0; w < world; ++w) {
    std::uint64_t total = 0;  // unsigned: what stands in a damaged file may wrap around
    for (std::int64_t s = 0; s < shards; ++s)
      total += static_cast<std::uint64_t>(lens[w * shards + s]);
    std::uint64_t begin = 0;
    for (std::int64_t s = 0; s < shards; ++s) {
      for (std::int64_t c = 0; c < copies; ++c) {
        const std::int64_t entry = (w * shards + s) * copies + c;
        if (ranks[entry] < 0 || ranks[entry] >= world) continue;
        result[at(ranks[entry])].push_back(
            {offsets[entry], w,
             static_cast<std::int64_t>(static_cast<std::uint64_t>(c) * total + begin),
             lens[w * shards + s]});
      }
      begin += static_cast<std::uint64_t>(lens[w * shards + s]);
    }
  }
  for (std::vector<Arrival>& list : result) {
    std::stable_sort(list.begin(), list.end(),
                     [](const Arrival& a, const Arrival& b) { return a.offset < b.offset; });
  }
  return result;
}

void fill_counts(const Metadata& forward, Metadata& reverse) {
  const std::int64_t world = forward.seq_len.dim(0);
  const Int64View counts(forward.num_recv_tokens);
  reverse.num_recv_tokens = IndexArray({world, world + 1});
  reverse.num_total_recv_tokens.assign(at(world), 0);
  const auto result = reverse.num_recv_tokens.i64();
  for (std::int64_t i = 0; i < world; ++i) {
    std::uint64_t total = 0;
    for (std::int64_t r = 0; r < world; ++r) {
      const std::int64_t rows = counts[r * (world + 1) + i];
      result[at(i * (world + 1) + r)] = rows;
      total += static_cast<std::uint64_t>(rows);
    }
    reverse.num_total_recv_tokens[at(i)] = static_cast<std::int64_t>(total);
    result[at(i * (world + 1) + world)] = reverse.num_total_recv_tokens[at(i)];
  }
}

}  // namespace

Metadata answer_to(const Metadata& forward) {
  forward.check_shapes("answer_to");
  const auto received = arrivals(forward);
  const std::int64_t world = forward.seq_len.dim(0);
  std::size_t most = 0;
  for (const auto& list : received) most = std::max(most, list.size());
  const auto width = static_cast<std::int64_t>(most);

  Metadata reverse;
  reverse.dst_rank = IndexArray::full({world, width}, -1);
  reverse.dst_offset = IndexArray({world, width});
  reverse.seq_len = IndexArray({world, width});
  IndexArray num_seqs({world});
  for (std::int64_t r = 0; r < world; ++r) {
    std::int64_t entry = r * width;
    for (const Arrival& arrival : received[at(r)]) {
      reverse.dst_rank.i64()[at(entry)] = arrival.src;
      reverse.dst_offset.i64()[at(entry)] = arrival.home_row;
      reverse.seq_len.i64()[at(entry)] = arrival.rows;
      num_seqs.i64()[at(r)] += arrival.rows > 0 ? 1 : 0;
      ++entry;
    }
  }
  reverse.num_seqs = std::move(num_seqs);
  reverse.world_size = world;
  fill_counts(forward, reverse);
  if (forward.has_copies()) {
    IndexArray mask(forward.dst_rank.shape());
    const Int64View ranks(forward.dst_rank);
    for (std::int64_t i = 0; i < mask.size(); ++i) mask.i64()[at(i)] = ranks[i] >= 0 ? 1 : 0;
    reverse.seq_recv_mask = mask.to(DType::boolean);
    reverse.recv_seq_lens = IndexArray(forward.seq_len.shape(), forward.seq_len.to_vector());
  }
  return forward.normalized ? reverse.normalize_dtype() : reverse;
}

namespace {

RecvCounts sparse_counts(const IndexArray& dense, std::int64_t world) {
  const Int64View counts(dense);
  RecvCounts result;
  result.offsets.push_back(0);
  for (std::int64_t r = 0; r < world; ++r) {
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < world; ++i) {
      const std::int64_t rows = counts[r * (world + 1) + i];
      if (rows == 0) continue;
      result.src_rank.push_back(static_cast<std::int32_t>(i));
      result.tokens.push_back(rows);
      total += rows;
    }
    result.offsets.push_back(std::ssize(result.src_rank));
    result.total.push_back(total);
  }
  return result;
}

// Entries without destination and rows are padding, wherever they stand.
SparseMetadata sparse_table(const Metadata& dense, bool one_copy) {
  const std::int64_t world = dense.seq_len.dim(0);
  const std::int64_t shards = dense.seq_len.dim(1);
  const std::int64_t copies = dense.has_copies() ? dense.dst_rank.dim(2) : 1;
  const Int64View lens(dense.seq_len);
  const Int64View ranks(dense.dst_rank);
  const Int64View offsets(dense.dst_offset);
  SparseMetadata table;
  table.world_size = static_cast<std::int32_t>(world);
  table.rank_offsets.push_back(0);
  if (!one_copy) table.copy_offsets.push_back(0);
  for (std::int64_t line = 0; line < world * shards; ++line) {
    const std::int64_t copies_before = table.num_copies();
    for (std::int64_t entry = line * copies; entry < (line + 1) * copies; ++entry) {
      if (ranks[entry] < 0) continue;
      table.dst_rank.push_back(static_cast<std::int32_t>(ranks[entry]));
      table.dst_offset.push_back(offsets[entry]);
    }
    if (table.num_copies() > copies_before || lens[line] > 0) {
      table.seq_len.push_back(lens[line]);
      if (!one_copy) table.copy_offsets.push_back(table.num_copies());
    }
    if ((line + 1) % shards == 0) table.rank_offsets.push_back(table.num_lines());
  }
  table.rank_offsets.resize(at(world + 1), table.num_lines());  // no shards at all
  table.recv = sparse_counts(dense.num_recv_tokens, world);
  return table;
}

SparseAttnLayout sparse_attention(const QkvPlan& plan, const AttnLayout& dense) {
  SparseAttnLayout result;
  std::vector<std::vector<std::int32_t>> shards(at(plan.world_size));
  for (std::int64_t n = 0; n < plan.num_shards(); ++n)
    shards[at(plan.q_dst[at(n)])].push_back(static_cast<std::int32_t>(n));
  result.rank_offsets.push_back(0);
  for (std::size_t r = 0; r < shards.size(); ++r) {
    const Int64View cu_q(dense.cu_seqlens_q.at(r));
    const bool groups = dense.cu_seqlens_kv.empty();
    const Int64View begin(groups ? dense.kv_begin.at(r) : dense.cu_seqlens_kv.at(r));
    const Int64View len(groups ? dense.kv_len.at(r) : dense.cu_seqlens_kv.at(r));
    for (std::size_t i = 0; i < shards[r].size(); ++i) {
      const auto entry = static_cast<std::int64_t>(i);
      result.shard.push_back(shards[r][i]);
      result.q_begin.push_back(cu_q[entry]);
      result.q_len.push_back(cu_q[entry + 1] - cu_q[entry]);
      result.kv_begin.push_back(begin[entry]);
      result.kv_len.push_back(groups ? len[entry] : begin[entry + 1] - begin[entry]);
    }
    result.rank_offsets.push_back(std::ssize(result.shard));
  }
  result.max_seqlen_q = dense.max_seqlen_q.to_vector();
  result.max_seqlen_kv = dense.max_seqlen_kv.to_vector();
  return result;
}

}  // namespace

QkvRouting sparse_routing(const QkvPlan& plan, const E2eMetadata& metadata) {
  QkvRouting routing;
  routing.kv_layout = plan.kv_layout;
  routing.fwd_q = sparse_table(metadata.fwd_q, true);
  routing.rev_q = sparse_table(metadata.rev_q, true);
  routing.fwd_kv = sparse_table(metadata.fwd_kv, false);
  routing.rev_kv = sparse_table(metadata.rev_kv, true);
  routing.attention = sparse_attention(plan, metadata.attention);
  return routing;
}

}  // namespace waybill::cli
