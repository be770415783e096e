#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "fuzz_input.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/qkv_routing.h"

// Draws tables from the fuzzer's bytes, and damages them.
namespace waybill::fuzz {

inline IndexArray draw_array(Input& input, Shape shape, std::int64_t low, std::int64_t high) {
  IndexArray array(shape);
  for (std::int64_t& element : array.i64()) element = input.value(low, high);
  return array;
}

inline std::vector<std::int64_t> draw_offsets(Input& input, std::int64_t parts, std::int64_t most) {
  std::vector<std::int64_t> offsets{0};
  for (std::int64_t i = 0; i < parts; ++i) offsets.push_back(offsets.back() + input.below(most));
  return offsets;
}

/// A plan that is mostly right.
inline QkvPlan draw_plan(Input& input) {
  QkvPlan plan;
  plan.world_size = static_cast<std::int32_t>(1 + input.below(6));
  plan.kv_layout = input.below(2) == 0 ? KvLayout::per_rank : KvLayout::per_query;
  plan.rank_shard_offsets = draw_offsets(input, plan.world_size, 5);
  const std::int64_t num_shards = plan.rank_shard_offsets.back();
  for (std::int64_t i = 0; i < num_shards; ++i) {
    plan.shard_len.push_back(input.value(0, 9));
    plan.q_dst.push_back(static_cast<std::int32_t>(input.value(0, plan.world_size - 1)));
  }
  plan.doc_shards.resize(static_cast<std::size_t>(num_shards));
  std::iota(plan.doc_shards.begin(), plan.doc_shards.end(), 0);
  for (std::int64_t i = num_shards; i > 1; --i) {
    std::swap(plan.doc_shards[static_cast<std::size_t>(i - 1)],
              plan.doc_shards[static_cast<std::size_t>(input.below(i))]);
  }
  plan.doc_shard_offsets = {0};
  while (plan.doc_shard_offsets.back() < num_shards) {
    plan.doc_shard_offsets.push_back(
        std::min(num_shards, plan.doc_shard_offsets.back() + input.below(6)));
    if (input.empty()) plan.doc_shard_offsets.back() = num_shards;
  }
  if (input.below(2) == 0) {
    if (input.below(3) == 1) plan.need_whole_documents();
    return plan;
  }
  plan.kv_begin.assign(plan.shard_len.size(), 0);
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    const auto first =
        static_cast<std::size_t>(plan.doc_shard_offsets[static_cast<std::size_t>(d)]);
    const auto last =
        static_cast<std::size_t>(plan.doc_shard_offsets[static_cast<std::size_t>(d + 1)]);
    std::int32_t begin = 0;
    for (std::size_t i = first; i < last; ++i) {
      const auto position = static_cast<std::int32_t>(i - first);
      begin = std::min(position, begin + static_cast<std::int32_t>(input.below(3)));
      plan.kv_begin[static_cast<std::size_t>(plan.doc_shards[i])] = begin;
    }
  }
  return plan;
}

template <class T>
void damage(Input& input, std::vector<T>& values) {
  const std::int64_t what = input.below(8);
  if (what == 0) values.clear();
  if (what == 1) values.push_back(static_cast<T>(input.value(-1, 9)));
  if (what > 1 && !values.empty()) {
    const auto at = static_cast<std::size_t>(input.byte()) % values.size();
    values[at] = static_cast<T>(input.value(-1, 9));
  }
}

template <class T>
void damage(Input& input, UninitializedVector<T>& values) {
  std::vector<T> plain(values.begin(), values.end());
  damage(input, plain);
  values.assign(plain.begin(), plain.end());
}

inline void damage(Input& input, QkvPlan& plan) {
  switch (input.below(8)) {
    case 0:
      plan.world_size = static_cast<std::int32_t>(input.value(0, 7));
      break;
    case 1:
      damage(input, plan.rank_shard_offsets);
      break;
    case 2:
      damage(input, plan.shard_len);
      break;
    case 3:
      damage(input, plan.q_dst);
      break;
    case 4:
      damage(input, plan.doc_shard_offsets);
      break;
    case 5:
      damage(input, plan.doc_shards);
      break;
    case 6:
      damage(input, plan.kv_begin);
      break;
    default:
      damage(input, plan.kv_end);
      break;
  }
}

inline void damage(Input& input, IndexArray& array) {
  const std::int64_t what = input.below(8);
  if (what == 0) array = IndexArray();
  if (what == 1) array = array.reshaped({array.size()});
  if (what == 2 && array.ndim() > 0 && array.dim(0) > 0) array = array.row(0);
  if (what == 3) array = array.reshaped({array.size(), 1, 1, 1});
  if (what > 3 && array.size() > 0 && array.dtype() == DType::int64) {
    const std::int64_t at = (input.byte() * 256 + input.byte()) % array.size();
    array.i64()[static_cast<std::size_t>(at)] = input.value(-1, 9);
  }
}

inline void damage(Input& input, Metadata& metadata) {
  switch (input.below(12)) {
    case 0:
      damage(input, metadata.dst_offset);
      break;
    case 1:
      damage(input, metadata.seq_len);
      break;
    case 2:
      damage(input, metadata.num_recv_tokens);
      break;
    case 3:
      if (metadata.seq_recv_mask) damage(input, *metadata.seq_recv_mask);
      break;
    case 4:
      if (metadata.recv_seq_lens) damage(input, *metadata.recv_seq_lens);
      break;
    case 5:
      if (metadata.num_seqs) damage(input, *metadata.num_seqs);
      break;
    case 6:
      damage(input, metadata.num_total_recv_tokens);
      break;
    case 7:
      metadata.world_size = input.value(0, 7);
      break;
    case 8:
      metadata.seq_recv_mask.reset();
      break;
    case 9:
      metadata.num_seqs.reset();
      break;
    case 10:
      metadata.normalized = !metadata.normalized;
      break;
    default:
      damage(input, metadata.dst_rank);
      break;
  }
}

inline void damage(Input& input, std::vector<IndexArray>& arrays) {
  if (input.below(6) == 0) {
    arrays.clear();
  } else if (!arrays.empty()) {
    damage(input, arrays[static_cast<std::size_t>(input.byte()) % arrays.size()]);
  }
}

inline void damage(Input& input, AttnLayout& layout) {
  switch (input.below(7)) {
    case 0:
      damage(input, layout.cu_seqlens_q);
      break;
    case 1:
      damage(input, layout.cu_seqlens_kv);
      break;
    case 2:
      damage(input, layout.max_seqlen_q);
      break;
    case 3:
      damage(input, layout.max_seqlen_kv);
      break;
    case 4:
      damage(input, layout.num_local_seqs_recv);
      break;
    case 5:
      damage(input, layout.kv_row);
      break;
    default:
      damage(input, layout.kv_len);
      break;
  }
}

inline void damage(Input& input, SparseMetadata& metadata) {
  switch (input.below(9)) {
    case 0:
      damage(input, metadata.rank_offsets);
      break;
    case 1:
      damage(input, metadata.seq_len);
      break;
    case 2:
      damage(input, metadata.copy_offsets);
      break;
    case 3:
      damage(input, metadata.dst_rank);
      break;
    case 4:
      damage(input, metadata.dst_offset);
      break;
    case 5:
      damage(input, metadata.recv.offsets);
      break;
    case 6:
      damage(input, metadata.recv.src_rank);
      break;
    case 7:
      damage(input, metadata.recv.tokens);
      break;
    default:
      damage(input, metadata.recv.total);
      break;
  }
}

inline void damage(Input& input, SparseAttnLayout& layout) {
  switch (input.below(6)) {
    case 0:
      damage(input, layout.rank_offsets);
      break;
    case 1:
      damage(input, layout.shard);
      break;
    case 2:
      damage(input, layout.q_begin);
      break;
    case 3:
      damage(input, layout.kv_row);
      break;
    case 4:
      damage(input, layout.kv_len);
      break;
    default:
      damage(input, layout.max_seqlen_kv);
      break;
  }
}

}  // namespace waybill::fuzz
