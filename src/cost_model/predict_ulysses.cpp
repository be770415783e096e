#include "waybill/cost_model/predict_ulysses.h"

#include <algorithm>
#include <vector>

#include "flows.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

using detail::FlowSet;

constexpr const char* in_predict_ulysses = "predict_ulysses";

/// The documents of one group of ranks.
struct GroupLoad {
  std::int64_t tokens = 0;
  std::int64_t work = 0;  ///< pairs of all heads
  std::int64_t heaviest = -1;
  std::int64_t heaviest_work = 0;
};

std::vector<GroupLoad> loads_of(std::span<const std::int64_t> doc_lengths,
                                const StaticPlanOptions& groups, const StepOptions& options) {
  std::vector<GroupLoad> loads(groups.world_size / groups.degree);
  std::int64_t first = 0;
  for (std::size_t d = 0; d < doc_lengths.size(); ++d) {
    GroupLoad& load = loads[first / (groups.tokens_per_rank * groups.degree)];
    const std::int64_t len = doc_lengths[d];
    const AttentionMask mask = options.mask.with_prefix(groups.prefix_of(d));
    const std::int64_t work = kernel_work(mask, options.hardware, 0, len, len);
    load.tokens += len;
    load.work += work;
    if (work > load.heaviest_work) {
      load.heaviest = static_cast<std::int64_t>(d);
      load.heaviest_work = work;
    }
    first += len;
  }
  return loads;
}

/// Part `i` of `whole` that is cut into `parts`; they add up to it.
std::int64_t part_of(std::int64_t whole, std::int64_t i, std::int64_t parts) {
  return whole / parts + (i < whole % parts ? 1 : 0);
}

/// All ranks of each group to all others of it, `row_bytes` of each row that they hold.
FlowSet exchange(const std::vector<GroupLoad>& loads, std::int32_t degree, std::int64_t row_bytes,
                 const Topology& nodes) {
  FlowSet set;
  for (std::size_t g = 0; g < loads.size(); ++g) {
    const auto first = static_cast<std::int32_t>(g) * degree;
    for (std::int32_t src = 0; src < degree; ++src) {
      const std::int64_t bytes = part_of(loads[g].tokens, src, degree) * row_bytes;
      for (std::int32_t dst = 0; bytes > 0 && dst < degree; ++dst) {
        if (dst != src) set.flows.push_back({first + src, first + dst, -1, bytes});
      }
    }
  }
  set.count(nodes);
  return set;
}

/// Amounts of the causes. No one document causes an exchange of all rows.
void find_amounts(const std::vector<GroupLoad>& loads, std::int32_t degree, StepPrediction& step) {
  const auto fill = [&](StepCause& cause) {
    if (cause.resource != StepResource::compute) {
      if (const detail::LinkField* const link = detail::link_of(cause.resource))
        cause.amount = step.phase(cause.phase).links[cause.rank].*link->bytes;
      return;
    }
    const GroupLoad& load = loads[cause.rank / degree];
    cause.amount = step.work[cause.rank];
    cause.document = load.heaviest;
    cause.document_amount = std::min(cause.amount, load.heaviest_work / degree);
  };
  for (PhasePrediction& phase : step.phases) fill(phase.slowest);
  for (StepCause& cause : step.path) fill(cause);
}

void check_bytes(std::span<const std::int64_t> doc_lengths, double row_bytes) {
  double rows = 0;
  for (const std::int64_t len : doc_lengths) rows += static_cast<double>(len);
  require(rows * row_bytes < 0x1p62, in_predict_ulysses, ": ", rows, " rows of ", row_bytes,
          " bytes, expected at most 2^62 bytes in all");
}

}  // namespace

std::optional<HeadCounts> heads_of(const ModelShape& model, std::int64_t head_dim) {
  require(head_dim >= 1, "heads_of: head_dim = ", head_dim, ", expected >= 1");
  if (model.q_hidden % head_dim != 0 || model.kv_hidden % head_dim != 0) return std::nullopt;
  return HeadCounts{model.q_hidden / head_dim, model.kv_hidden / head_dim};
}

std::optional<HeadCounts> ulysses_heads(const HeadCounts& heads, std::int32_t degree) {
  const bool divide = heads.q % degree == 0 && (heads.kv % degree == 0 || degree % heads.kv == 0);
  if (!divide) return std::nullopt;
  return HeadCounts{heads.q / degree, std::max<std::int64_t>(1, heads.kv / degree)};
}

StepPrediction predict_ulysses(std::span<const std::int64_t> doc_lengths,
                               const StaticPlanOptions& groups, std::int64_t head_dim,
                               const StepOptions& options) {
  options.check(in_predict_ulysses);
  groups.check(doc_lengths, in_predict_ulysses);
  const auto heads = heads_of(options.model, head_dim);
  const auto mine = heads ? ulysses_heads(*heads, groups.degree) : std::nullopt;
  require(mine.has_value(), in_predict_ulysses, ": head_dim = ", head_dim,
          ", degree = ", groups.degree, ", expected heads of rows of ", options.model.q_hidden,
          " and ", options.model.kv_hidden, " elements that they divide");
  const Topology nodes{groups.world_size, options.hardware.ranks_per_node};
  const std::int64_t head_bytes = head_dim * dtype_bytes(options.model.dtype);
  const std::int64_t q_bytes = head_bytes * mine->q;
  const std::int64_t kv_bytes = head_bytes * 2 * mine->kv;
  check_bytes(doc_lengths, static_cast<double>(q_bytes + kv_bytes) * groups.degree);
  const std::vector<GroupLoad> loads = loads_of(doc_lengths, groups, options);

  StepPrediction step;
  step.options = options;
  step.options.transfer = TransferMode::direct;
  step.world_size = groups.world_size;
  for (std::int32_t r = 0; r < groups.world_size; ++r) {
    step.work.push_back(part_of(loads[r / groups.degree].work, r % groups.degree, groups.degree));
  }
  const auto of_rows = [&](std::int64_t bytes) {
    return exchange(loads, groups.degree, bytes, nodes);
  };
  const detail::StepFlows flows{of_rows(q_bytes + kv_bytes), of_rows(q_bytes), of_rows(kv_bytes)};
  detail::run_phases(flows, nodes, 1, false, {}, step);
  detail::sum_up(step);
  find_amounts(loads, groups.degree, step);
  return step;
}

}  // namespace waybill
