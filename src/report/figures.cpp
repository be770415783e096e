#include "figures.h"

#include <algorithm>
#include <cmath>

#include "waybill/core/error.h"

namespace waybill::detail {

std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* who) {
  std::int64_t result = 0;
  require(!__builtin_mul_overflow(a, b, &result), who, ": ", a, " * ", b, " exceeds 2^63 - 1");
  return result;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* who) {
  std::int64_t result = 0;
  require(!__builtin_add_overflow(a, b, &result), who, ": ", a, " + ", b, " exceeds 2^63 - 1");
  return result;
}

void check_speed(double gb_per_s, const char* who) {
  require(std::isfinite(gb_per_s) && gb_per_s >= 0, who, ": gb_per_s = ", gb_per_s,
          ", expected a number >= 0");
}

namespace {

void check_table(const QkvPlan& plan, const SparseMetadata& table, const char* name,
                 const char* who) {
  require(table.world_size == plan.world_size, who, ": routing.", name,
          ".world_size = ", table.world_size, ", expected the plan's, ", plan.world_size);
  require(table.num_entries() == plan.num_shards(), who, ": routing.", name, " has ",
          table.num_entries(), " entries, expected one per shard, ", plan.num_shards());
  require(std::equal(table.seq_len.begin(), table.seq_len.end(), plan.shard_len.begin()), who,
          ": routing.", name, ".seq_len differs from the plan's shard_len");
  const std::int64_t num_destinations =
      plan.num_shards() == 0 ? 0 : table.destination_end(plan.num_shards() - 1);
  require(num_destinations == table.num_destinations(), who, ": routing.", name, ".dst_rank has ",
          table.num_destinations(), " entries, expected ", num_destinations);
  for (const std::int32_t rank : table.dst_rank) {
    require(0 <= rank && rank < plan.world_size, who, ": routing.", name, ".dst_rank = ", rank,
            ", expected 0..", plan.world_size - 1);
  }
  const RecvCounts& recv = table.recv;
  require(std::ssize(recv.offsets) == plan.world_size + 1 &&
              std::ssize(recv.src_rank) == recv.offsets.back() &&
              recv.tokens.size() == recv.src_rank.size(),
          who, ": routing.", name, ".recv has tables of other lengths than its offsets say");
}

}  // namespace

void check_belongs(const QkvPlan& plan, const QkvRouting& routing, const RowBytes& row_bytes,
                   const char* who) {
  plan.check(who);
  require(row_bytes.q >= 0, who, ": row_bytes.q = ", row_bytes.q, ", expected >= 0");
  require(row_bytes.kv >= 0, who, ": row_bytes.kv = ", row_bytes.kv, ", expected >= 0");
  check_table(plan, routing.fwd_q, "fwd_q", who);
  check_table(plan, routing.fwd_kv, "fwd_kv", who);
}

std::vector<std::int64_t> document_of_shards(const QkvPlan& plan) {
  std::vector<std::int64_t> result(plan.shard_len.size());
  for (std::int64_t d = 0; d < plan.num_documents(); ++d) {
    for (std::int64_t i = plan.doc_shard_offsets[d]; i < plan.doc_shard_offsets[d + 1]; ++i)
      result[plan.doc_shards[i]] = d;
  }
  return result;
}

}  // namespace waybill::detail
