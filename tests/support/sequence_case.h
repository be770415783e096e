#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/number.h"
#include "core/to_size.h"
#include "schedule/sequence_plan.h"
#include "support/random_plan.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/random.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill::test {

using waybill::detail::to_size;

/// A routing, the formats of Q, K and V, and what belongs where.
struct SequenceCase {
  std::string name;
  QkvRouting routing;
  TensorFormat q{DType::bfloat16, 64};
  TensorFormat k{DType::bfloat16, 32};
  TensorFormat v{DType::bfloat16, 32};

  [[nodiscard]] std::int32_t world_size() const { return routing.fwd_q.world_size; }
};

/// Finite numbers of mixed size for floating types, random bytes for others.
inline void fill(HostTensor& tensor, std::uint64_t seed) {
  Random random(seed);
  const auto value = [&] {
    return (random.uniform_float() - 0.5F) * static_cast<float>(1 << random.below(12));
  };
  switch (tensor.dtype()) {
    case DType::bfloat16:
      for (auto& x : tensor.as<std::uint16_t>()) x = float_to_bfloat16(value());
      return;
    case DType::float16:
      for (auto& x : tensor.as<std::uint16_t>()) x = float_to_float16(value());
      return;
    case DType::float32:
      for (auto& x : tensor.as<float>()) x = value();
      return;
    case DType::float64:
      for (auto& x : tensor.as<double>()) x = static_cast<double>(value());
      return;
    default:
      for (auto& x : tensor.bytes()) x = static_cast<std::byte>(random.bits() >> 56);
  }
}

/// [W] of [rows, hidden], filled.
inline std::vector<HostTensor> random_tensors(const TensorFormat& format,
                                              const std::vector<std::int64_t>& rows,
                                              std::uint64_t seed) {
  std::vector<HostTensor> tensors;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    tensors.emplace_back(format.dtype, Shape{rows[r], format.hidden});
    fill(tensors.back(), seed * 1009 + r);
  }
  return tensors;
}

/// Rows that each rank sends, and that each rank needs to receive.
inline std::vector<std::int64_t> rows_sent(const SparseMetadata& metadata) {
  std::vector<std::int64_t> rows(metadata.world_size);
  for (std::size_t w = 0; w < rows.size(); ++w) {
    for (auto j = metadata.rank_offsets[w]; j < metadata.rank_offsets[w + 1]; ++j) {
      rows[w] += metadata.seq_len[j];
    }
  }
  return rows;
}

inline std::vector<std::int64_t> rows_received(const SparseMetadata& metadata) {
  std::vector<std::int64_t> rows(metadata.world_size);
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    const std::int64_t len = metadata.seq_len[j];
    for (auto c = metadata.destination_begin(j); len > 0 && c < metadata.destination_end(j); ++c) {
      auto& end = rows[metadata.dst_rank[c]];
      end = std::max(end, metadata.dst_offset[c] + len);
    }
  }
  return rows;
}

/// What simulate_dispatch delivers. Rows that nobody writes are zeros.
inline std::vector<HostTensor> simulated(const SparseMetadata& metadata,
                                         const std::vector<HostTensor>& sources,
                                         std::vector<std::int64_t> output_rows = {}) {
  if (output_rows.empty()) output_rows = rows_received(metadata);
  std::vector<HostTensor> outputs;
  std::vector<ConstTensorView> from;
  std::vector<TensorView> to;
  for (std::size_t r = 0; r < sources.size(); ++r) {
    outputs.emplace_back(sources[r].dtype(), Shape{output_rows[r], sources[r].shape()[1]});
    from.push_back(sources[r].view());
  }
  for (HostTensor& output : outputs) to.push_back(output.view());
  simulate_dispatch(from, to, metadata);
  return outputs;
}

/// What the reverse dispatch into planes and sum_kv_copies make of the gradients of each rank's
/// copies.
inline std::vector<HostTensor> simulated_gradient(const QkvRouting& routing,
                                                  const std::vector<HostTensor>& gradients,
                                                  DType dtype) {
  const Metadata reverse = to_dense_reverse(routing.rev_kv, routing.fwd_kv);
  const std::int64_t copies = reverse.seq_recv_mask->dim(2);
  std::vector<std::int64_t> own = rows_sent(routing.fwd_kv);
  std::vector<std::int64_t> plane_rows = own;
  for (auto& rows : plane_rows) rows *= copies;
  const auto planes = simulated(routing.rev_kv, gradients, plane_rows);
  std::vector<HostTensor> sums;
  for (std::size_t r = 0; r < own.size(); ++r) {
    sums.emplace_back(dtype, Shape{own[r], gradients[r].shape()[1]});
    sum_kv_copies(planes[r].view(), sums[r].view(), reverse, Rank{static_cast<std::int32_t>(r)});
  }
  return sums;
}

/// Some shards of the given lengths on each rank, one document, all queries to the given ranks.
inline QkvPlan plain_plan(std::int32_t world_size,
                          const std::vector<std::vector<std::int64_t>>& shard_len,
                          const std::vector<std::int32_t>& q_dst, KvLayout kv_layout) {
  QkvPlan plan;
  plan.world_size = world_size;
  plan.kv_layout = kv_layout;
  plan.rank_shard_offsets.push_back(0);
  for (const auto& of_rank : shard_len) {
    plan.shard_len.insert(plan.shard_len.end(), of_rank.begin(), of_rank.end());
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  plan.q_dst = q_dst;
  plan.doc_shard_offsets = {0, plan.num_shards()};
  for (std::int32_t s = 0; s < plan.num_shards(); ++s) plan.doc_shards.push_back(s);
  return plan;
}

/// The plans that break things, and random ones. Every second one of these has a PlanEdge, but not
/// the last: tests of a single case take it.
inline std::vector<SequenceCase> sequence_cases(std::int32_t world, int num_random,
                                                std::int64_t scale = 1) {
  std::vector<SequenceCase> cases;
  const auto add = [&](std::string name, const QkvPlan& plan) -> SequenceCase& {
    cases.push_back({std::move(name), compute_qkv_routing(plan)});
    return cases.back();
  };
  const std::size_t w = world;
  for (const KvLayout layout : {KvLayout::per_rank, KvLayout::per_query}) {
    add("no shards", plain_plan(world, std::vector<std::vector<std::int64_t>>(w), {}, layout));
    auto one = std::vector<std::vector<std::int64_t>>(w);
    one.back() = {1};
    add("one token", plain_plan(world, one, {0}, layout));
    const std::vector<std::vector<std::int64_t>> three(w, {scale * 2, 0, scale * 3});
    std::vector<std::int32_t> dst(w * 3, world - 1);
    add("one rank gets all", plain_plan(world, three, dst, layout));
    for (std::size_t s = 0; s < dst.size(); ++s) dst[s] = static_cast<std::int32_t>(s % w);
    add("many copies", plain_plan(world, three, dst, layout));
    for (std::size_t s = 0; s < dst.size(); ++s) dst[s] = static_cast<std::int32_t>(s / 3);
    add("nothing moves", plain_plan(world, three, dst, layout));
  }
  constexpr DType dtypes[] = {DType::bfloat16, DType::float16, DType::float32, DType::float64};
  constexpr std::int64_t hiddens[] = {8, 64, 1, 3, 17, 125, 1024, 5000};
  for (int i = 0; i < num_random; ++i) {
    RandomPlanOptions options;
    options.world_size = world;
    options.max_shard_len = 20 * scale;
    options.kv_layout = i % 2 == 0 ? KvLayout::per_rank : KvLayout::per_query;
    options.windows = i % 3 == 0;
    options.edge_share = i % 2 == 1 && i + 1 < num_random ? 1 : 0;
    SequenceCase& random = add(concat("random ", i), random_plan(to_size(i + 1), options));
    random.q = {dtypes[i % 4], hiddens[i % 8]};
    random.k = {dtypes[(i / 2) % 4], hiddens[(i + 1) % 8]};
    random.v = {random.k.dtype, hiddens[(i + 2) % 8]};
  }
  return cases;
}

}  // namespace waybill::test
