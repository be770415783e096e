#include <algorithm>

#include "input_checks.h"
#include "moe/row_accumulator.h"
#include "waybill/core/error.h"
#include "waybill/moe/simulate.h"

namespace waybill {
namespace {

constexpr const char* in_combine = "simulate_expert_combine";

/// One row that belongs to a token.
struct TokenRow {
  std::int32_t group = 0;  ///< its rank or node, where sums of groups are rounded
  const std::byte* row = nullptr;
  double weight = 1;
};

void check_arguments(const ExpertDispatch& dispatch,
                     std::span<const ConstTensorView> expert_outputs,
                     const EPCombineOptions& options,
                     std::span<const std::span<const ConstTensorView>> biases) {
  const EPConfig& config = dispatch.config;
  const auto check_list = [&](std::span<const ConstTensorView> list, const char* name,
                              const std::vector<std::int32_t>& rows) {
    require(std::ssize(list) == config.world_size, in_combine, ": ", name, " has ", list.size(),
            " entries, expected one for each of ", config.world_size, " ranks");
    for (std::size_t r = 0; r < list.size(); ++r) {
      detail::check_matrix(list[r], rows[r], config.hidden, config.token_dtype, in_combine, name,
                           r);
    }
  };
  check_list(expert_outputs, "expert_outputs", dispatch.rows.num_recv_rows);
  dispatch.options.payload.check_combine(in_combine);
  require(biases.size() <= 2, in_combine, ": ", biases.size(), " biases, expected at most 2");
  for (const auto& bias : biases) check_list(bias, "bias", dispatch.rows.num_input_tokens);
  require(!options.weighted || !dispatch.source_weights.empty(), in_combine,
          ": weighted = true, but the dispatch had no weights");
  require(!options.weighted || dispatch.options.rows == EPRows::grouped, in_combine,
          ": weighted = true, expected false for compact rows: they hold sums already");
}

class Combiner {
 public:
  Combiner(const ExpertDispatch& dispatch, std::span<const ConstTensorView> outputs,
           const EPCombineOptions& options)
      : dispatch_(dispatch),
        config_(dispatch.config),
        outputs_(outputs),
        weighted_(options.weighted),
        compact_(dispatch.options.rows == EPRows::compact),
        by_node_(!config_.is_intra_node()),
        in_groups_(by_node_ || (options.local_combine && !compact_)),
        total_(config_.hidden, config_.token_dtype),
        share_(config_.hidden, config_.token_dtype) {}

  void sum_token(std::int32_t src, std::int64_t token,
                 std::span<const std::span<const ConstTensorView>> biases, std::byte* out) {
    total_.reset();
    for (const auto& bias : biases) total_.add(row_of(bias[src], token));
    collect(src, token);
    if (in_groups_) {
      for (std::size_t first = 0; first < rows_.size();) first = add_group(first);
    } else {
      for (const TokenRow& row : rows_) add(total_, row);
    }
    total_.write(out);
  }

 private:
  static const std::byte* row_of(const ConstTensorView& view, std::int64_t row) {
    return view.data + row * view.strides[0] * dtype_bytes(view.dtype);
  }

  void add(RowAccumulator& sum, const TokenRow& row) const {
    if (weighted_) {
      sum.add_weighted(row.row, row.weight);
    } else {
      sum.add(row.row);
    }
  }

  /// The token's rows, those of a group together: groups in the order in which they are summed,
  /// topk slots ascending in each.
  void collect(std::int32_t src, std::int64_t token) {
    rows_.clear();
    std::int32_t num_ranks = 0;
    for (std::int64_t k = 0; k < config_.topk; ++k) {
      const std::int64_t entry = token * config_.topk + k;
      const std::int32_t rank = config_.rank_of_expert(dispatch_.ids[src][entry]);
      if (rank == config_.world_size) continue;
      const bool seen = std::find(ranks_, ranks_ + num_ranks, rank) != ranks_ + num_ranks;
      if (!seen) ranks_[num_ranks++] = rank;
      if (compact_ && seen) continue;
      const auto order = std::find(ranks_, ranks_ + num_ranks, rank) - ranks_;
      TokenRow row{by_node_ ? rank / config_.local_world_size : static_cast<std::int32_t>(order),
                   row_of(outputs_[rank], dispatch_.dst_row[src][entry])};
      if (weighted_) {
        row.weight =
            weight_at(dispatch_.source_weights[src].bytes().data(), entry, config_.weight_dtype);
      }
      rows_.push_back(row);
    }
    if (in_groups_) std::ranges::stable_sort(rows_, {}, &TokenRow::group);
  }

  /// @return the first row of the next group
  std::size_t add_group(std::size_t first) {
    share_.reset();
    std::size_t next = first;
    for (; next < rows_.size() && rows_[next].group == rows_[first].group; ++next) {
      add(share_, rows_[next]);
    }
    total_.add_rounded(share_);
    return next;
  }

  const ExpertDispatch& dispatch_;
  const EPConfig& config_;
  std::span<const ConstTensorView> outputs_;
  bool weighted_;
  bool compact_;
  bool by_node_;
  bool in_groups_;
  RowAccumulator total_;
  RowAccumulator share_;
  std::vector<TokenRow> rows_;
  std::int32_t ranks_[max_topk] = {};
};

}  // namespace

std::vector<HostTensor> simulate_expert_combine(
    const ExpertDispatch& dispatch, std::span<const ConstTensorView> expert_outputs,
    const EPCombineOptions& options, std::span<const std::span<const ConstTensorView>> biases) {
  check_arguments(dispatch, expert_outputs, options, biases);
  const EPConfig& config = dispatch.config;
  const std::int64_t row_bytes = config.hidden * dtype_bytes(config.token_dtype);
  Combiner combiner(dispatch, expert_outputs, options);
  std::vector<HostTensor> results;
  for (std::int32_t src = 0; src < config.world_size; ++src) {
    const std::int64_t tokens = dispatch.rows.num_input_tokens[src];
    HostTensor& result = results.emplace_back(config.token_dtype, Shape{tokens, config.hidden});
    for (std::int64_t token = 0; token < tokens; ++token) {
      combiner.sum_token(src, token, biases, result.bytes().data() + token * row_bytes);
    }
  }
  return results;
}

}  // namespace waybill
