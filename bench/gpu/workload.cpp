#include "workload.h"

#include <algorithm>

#include "support/packed_plan.h"
#include "waybill/core/error.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/generators.h"

namespace waybill::bench {

std::vector<SequencePart> Workload::parts() const {
  std::vector<SequencePart> result;
  if (q.hidden > 0) result.push_back({&routing.fwd_q, {q}});
  const RelaySchedule* const schedule = relay.empty() ? nullptr : &relay;
  if (kv.hidden > 0) result.push_back({&routing.fwd_kv, {kv, kv}, schedule});
  return result;
}

WireBytes wire_bytes(const Workload& workload) {
  const std::int32_t world = workload.routing.fwd_q.world_size;
  std::vector<std::int64_t> out(world);
  std::vector<std::int64_t> in(world);
  WireBytes most;
  for (std::int32_t w = 0; w < world; ++w) {
    const auto parts = workload.parts();
    const SequencePlan plan =
        compile_dispatch(parts, Rank{w}, {.plan = {.relay = RelayUse::never}});
    for (std::int32_t r = 0; r < world; ++r) {
      const std::int64_t bytes = plan.wire_bytes[r];
      if (r == w) {
        most.local = std::max(most.local, bytes);
        continue;
      }
      out[w] += bytes;
      in[r] += bytes;
      most.total += bytes;
    }
  }
  most.out = *std::ranges::max_element(out);
  most.in = *std::ranges::max_element(in);
  return most;
}

Workload uniform(std::int32_t world_size, std::int64_t bytes_a_rank, std::int64_t row_bytes,
                 std::int64_t shards) {
  QkvPlan plan;
  plan.world_size = world_size;
  plan.rank_shard_offsets.push_back(0);
  const std::int64_t rows = bytes_a_rank / row_bytes;
  for (std::int32_t w = 0; w < world_size; ++w) {
    for (std::int64_t s = 0; s < shards * world_size; ++s) {
      plan.shard_len.push_back(rows / (shards * world_size));
      plan.q_dst.push_back(static_cast<std::int32_t>(s % world_size));
    }
    plan.rank_shard_offsets.push_back(plan.num_shards());
  }
  plan.doc_shard_offsets.push_back(0);
  for (std::int32_t s = 0; s < plan.num_shards(); ++s) {  // each shard a document
    plan.doc_shards.push_back(s);
    plan.doc_shard_offsets.push_back(s + 1);
  }
  Workload workload;
  workload.name = concat("uniform ", bytes_a_rank >> 20, " MiB, rows of ", row_bytes, " B");
  workload.routing = compute_qkv_routing(plan);
  workload.q.hidden = row_bytes / 2;
  return workload;
}

Workload documents(std::int32_t world_size, const std::string& lengths,
                   SequenceOperation operation) {
  test::PackedPlanOptions options;
  options.world_size = world_size;
  const auto docs = sample_documents(length_distribution(lengths),
                                     world_size * options.tokens_per_rank, /*seed=*/1);
  Workload workload;
  workload.operation = operation;
  workload.routing = compute_qkv_routing(test::packed_plan(docs, options));
  workload.kv.hidden = 8 * 128;
  if (operation == SequenceOperation::dispatch) workload.q.hidden = 32 * 128;
  workload.name = concat(lengths, operation == SequenceOperation::dispatch ? ", Q K V" : ", dK dV");
  return workload;
}

Workload skewed(std::int32_t world_size, const std::string& lengths, SequenceOperation operation) {
  constexpr std::int64_t tokens = 65536;
  double most = -1;  // of one rank all are 0
  AttentionPlan worst;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto docs = sample_documents(length_distribution(lengths), world_size * tokens, seed);
    PlannerOptions options;
    options.world_size = world_size;
    options.hardware.ranks_per_node = world_size;
    AttentionPlan plan = plan_attention(docs, options);
    const auto in = plan.bytes_in();
    const auto out = plan.bytes_out();
    const double skew =
        static_cast<double>(*std::ranges::max_element(out)) /
        static_cast<double>(std::max<std::int64_t>(1, *std::ranges::max_element(in)));
    if (skew <= most) continue;
    most = skew;
    worst = std::move(plan);
  }
  Workload workload;
  workload.operation = operation;
  workload.routing = compute_qkv_routing(worst.plan);
  workload.relay = std::move(worst.relay);
  workload.kv.hidden = 8 * 128;
  workload.name =
      concat(lengths, ", skewed, ", operation == SequenceOperation::dispatch ? "K V" : "dK dV");
  return workload;
}

}  // namespace waybill::bench
