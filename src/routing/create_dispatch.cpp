#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dense_checks.h"
#include "plan_builder.h"
#include "waybill/core/error.h"
#include "waybill/core/random.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

void check_arguments(const char* who, std::int64_t world_size, std::int64_t total_seq_len,
                     std::int64_t num_seqs, std::int64_t max_cp_degree) {
  require(1 <= world_size && world_size <= max_world_size, who, ": world_size = ", world_size,
          ", expected 1..", max_world_size);
  require(1 <= max_cp_degree && max_cp_degree <= world_size, who,
          ": max_cp_degree = ", max_cp_degree, ", expected 1..world_size = ", world_size,
          ": the shards of a sequence go to different ranks");
  require(total_seq_len >= 0 && total_seq_len % max_cp_degree == 0, who,
          ": total_seq_len = ", total_seq_len,
          ", expected a multiple of max_cp_degree = ", max_cp_degree);
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();  // of gen_seq_lens
  require(total_seq_len / max_cp_degree <= most, who, ": total_seq_len = ", total_seq_len,
          ", expected at most (2^31 - 1) * max_cp_degree");
  require(1 <= num_seqs && num_seqs <= most / world_size, who, ": num_seqs = ", num_seqs,
          ", expected 1..2^31 / world_size");
}

/// Cuts a sequence into `destinations.size()` shards, equal to one row, longer ones first.
void add_sequence(detail::PlanBuilder& plan, std::int64_t num_tokens,
                  const std::vector<std::int32_t>& destinations) {
  const std::int64_t cp = std::ssize(destinations);
  for (std::int64_t s = 0; s < cp; ++s) {
    plan.add_shard(num_tokens / cp + (s < num_tokens % cp ? 1 : 0),
                   destinations[static_cast<std::size_t>(s)]);
  }
  plan.end_document();
}

/// A random plan for the function `who`.
RawQkvDispatchWithLens random_dispatch(const char* who, std::int64_t world_size,
                                       std::int64_t total_seq_len, std::int64_t num_seqs,
                                       std::int64_t max_cp_degree, std::uint64_t seed) {
  check_arguments(who, world_size, total_seq_len, num_seqs, max_cp_degree);
  Random random(seed);
  IndexArray seq_lens =
      gen_seq_lens(world_size, num_seqs, total_seq_len / max_cp_degree, random.bits())
          .to(DType::int64);
  for (std::int64_t& len : seq_lens.i64()) len *= max_cp_degree;

  const auto num_degrees =
      static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(max_cp_degree)));
  detail::PlanBuilder builder(world_size, KvLayout::per_query);
  std::size_t next = 0;
  for (std::int64_t w = 0; w < world_size; ++w) {
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const auto cp = static_cast<std::int32_t>(std::int64_t{1} << random.below(num_degrees));
      add_sequence(builder, seq_lens.i64()[next++],
                   random.permutation(static_cast<std::int32_t>(world_size), cp));
    }
    builder.end_rank();
  }
  RawQkvDispatchWithLens result;
  result.plan = builder.take();
  result.raw = to_raw_dispatch(result.plan, max_cp_degree);
  result.seq_lens = std::move(seq_lens);
  return result;
}

}  // namespace

RawQkvDispatchWithLens create_raw_qkv_dispatch(std::int64_t world_size, std::int64_t total_seq_len,
                                               std::int64_t num_seqs, std::int64_t max_cp_degree,
                                               std::uint64_t seed) {
  return random_dispatch("create_raw_qkv_dispatch", world_size, total_seq_len, num_seqs,
                         max_cp_degree, seed);
}

RawQkvDispatchWithLens create_raw_qkv_dispatch(const IndexArray& seq_lens, const IndexArray& cp_num,
                                               const IndexArray& cp_dst) {
  const char* who = "create_raw_qkv_dispatch";
  const detail::Int64Table lens(who, "seq_lens", seq_lens);
  const detail::Int64Table degrees(who, "cp_num", cp_num);
  const detail::Int64Table ranks(who, "cp_dst", cp_dst);
  const auto [world_size, num_seqs] = detail::check_world_matrix(who, "seq_lens", *lens);
  require(ranks->ndim() == 3, who, ": cp_dst has shape ", to_string(ranks->shape()),
          ", expected [W, n, C]");
  const std::int64_t slots = ranks->dim(2);
  detail::check_same_shape(who, "cp_num", *degrees, lens->shape());
  detail::check_same_shape(who, "cp_dst", *ranks, {world_size, num_seqs, slots});
  detail::check_lengths(who, "seq_lens", *lens);
  detail::PlanBuilder builder(world_size, KvLayout::per_query);
  for (std::int64_t w = 0; w < world_size; ++w) {
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const std::int64_t cp = degrees->at({w, i});
      require(1 <= cp && cp <= slots, who, ": cp_num of rank ", w, ", sequence ", i, " = ", cp,
              ", expected 1..", slots);
      std::vector<std::int32_t> destinations;
      for (std::int64_t c = 0; c < cp; ++c) {
        const std::int64_t dst = ranks->at({w, i, c});
        require(0 <= dst && dst < world_size, who, ": cp_dst of rank ", w, ", sequence ", i,
                ", shard ", c, " = ", dst, ", expected 0..", world_size - 1);
        destinations.push_back(static_cast<std::int32_t>(dst));
      }
      add_sequence(builder, lens->at({w, i}), destinations);
    }
    builder.end_rank();
  }
  RawQkvDispatchWithLens result;
  result.plan = builder.take();
  result.raw = to_raw_dispatch(result.plan, std::max<std::int64_t>(slots, 1));
  result.seq_lens = *lens;
  return result;
}

QkvDispatch create_qkv_dispatch(std::int64_t world_size, std::int64_t total_seq_len,
                                std::int64_t num_seqs, std::int64_t max_cp_degree,
                                std::uint64_t seed, bool return_intermediate) {
  RawQkvDispatchWithLens random = random_dispatch("create_qkv_dispatch", world_size, total_seq_len,
                                                  num_seqs, max_cp_degree, seed);
  QkvDispatch result;
  result.raw = std::move(random.raw);
  result.seq_lens = std::move(random.seq_lens);
  result.plan = std::move(random.plan);
  result.metadata =
      compute_e2e_metadata(result.raw.cp_seq_lens, result.raw.num_cp_shards,
                           result.raw.cp_query_dst, result.raw.kv, return_intermediate);
  return result;
}

}  // namespace waybill
