#include "expert_load.h"

#include <algorithm>
#include <utility>

#include "core/batch_bytes.h"
#include "moe/token_routes.h"

namespace waybill::detail {
namespace {

/// Tokens of which a put carries adjacent ones, at most.
constexpr std::int64_t put_tokens = 32;

/// Counts puts from one source to one peer: runs of tokens, cut at every 32nd and where a put would
/// get too long.
class PutCount {
 public:
  explicit PutCount(std::int64_t row_bytes)
      : step_(std::clamp<std::int64_t>(most_put_bytes / row_bytes, 1, put_tokens)) {}

  /// @param first number of the source's token 0 among those of all sources
  /// @return whether the token begins a put. Tokens ascend.
  bool begins(std::int64_t first, std::int64_t token) {
    const std::int64_t in_window = token % put_tokens;
    const bool begins = first + token != last_ + 1 || in_window % step_ == 0;
    last_ = first + token;
    return begins;
  }

 private:
  std::int64_t step_;
  std::int64_t last_ = -2;
};

class LoadCount {
 public:
  LoadCount(const EPConfig& config, const EPDispatchOptions& dispatch)
      : config_(config),
        loads_(config.world_size),
        parts_(num_scales(config, dispatch) > 0 ? 2 : 1),
        row_bytes_(payload_row_bytes(config, dispatch)),
        sum_bytes_(config.hidden * dtype_bytes(config.token_dtype)),
        routes_(config, 0),
        to_node_(config.num_nodes(), PutCount(row_bytes_)),
        from_node_(config.num_nodes(), PutCount(sum_bytes_)),
        to_rank_(config.world_size, PutCount(row_bytes_)),
        from_rank_(config.world_size, PutCount(sum_bytes_)) {}

  /// What it keeps of a rank or node is told from that of the last source by numbers of tokens:
  /// clearing it would take the square of the ranks.
  void count_source(std::int32_t source, std::span<const std::int32_t> ids) {
    source_ = source;
    routes_.begin(source);
    const std::int64_t tokens = std::ssize(ids) / config_.topk;
    loads_[source].tokens = tokens;
    for (std::int64_t i = 0; i < std::ssize(ids); ++i) {
      const std::int64_t token = i / config_.topk;
      const TopkRoute route = routes_.next(token, ids[i]);
      if (route.rank != config_.world_size) count_slot(token, route);
    }
    first_ += tokens + 1;  // no run goes on
  }

  [[nodiscard]] std::vector<ExpertRankLoad> take() { return std::move(loads_); }

 private:
  [[nodiscard]] bool is_other_node(std::int32_t rank) const {
    return rank / config_.local_world_size != source_ / config_.local_world_size;
  }

  void count_slot(std::int64_t token, const TopkRoute& route) {
    ExpertRankLoad& home = loads_[source_];
    ExpertRankLoad& forwarder = loads_[route.forwarder];
    ExpertRankLoad& there = loads_[route.rank];
    const bool crosses = is_other_node(route.rank);
    ++there.computed;
    if (crosses) ++there.computed_of_others;
    if (route.to_node) {
      for (ExpertLinkRows ExpertRankLoad::*rows :
           {&ExpertRankLoad::per_node, &ExpertRankLoad::slots}) {
        ++(home.*rows).network_out;
        ++(forwarder.*rows).network_in;
      }
      const std::size_t node = route.forwarder / config_.local_world_size;
      if (to_node_[node].begins(first_, token)) home.puts_out += parts_;
      if (from_node_[node].begins(first_, token)) ++forwarder.puts_back;
    }
    if (route.rank == route.forwarder) {
      ++there.kept_slots;
    } else {
      ++forwarder.slots.nvlink_out;
      ++there.slots.nvlink_in;
      if (crosses) ++forwarder.forwarded_slots;
    }
    if (route.to_rank) count_row(token, route, home, forwarder, there);
  }

  void count_row(std::int64_t token, const TopkRoute& route, ExpertRankLoad& home,
                 ExpertRankLoad& forwarder, ExpertRankLoad& there) {
    const bool crosses = is_other_node(route.rank);
    ++there.received;
    if (route.rank == route.forwarder) {
      ++there.kept;
      if (crosses) ++there.kept_of_others;
    } else {
      ++forwarder.per_node.nvlink_out;
      ++there.per_node.nvlink_in;
      if (crosses) ++forwarder.forwarded;
    }
    if (route.rank == source_) return;
    ++(crosses ? home.straight.network_out : home.straight.nvlink_out);
    ++(crosses ? there.straight.network_in : there.straight.nvlink_in);
    if (!crosses) return;
    if (to_rank_[route.rank].begins(first_, token)) home.runs_out += parts_;
    if (from_rank_[route.rank].begins(first_, token)) ++there.runs_back;
  }

  const EPConfig& config_;
  std::vector<ExpertRankLoad> loads_;
  std::int64_t parts_;  ///< rows, and their scales
  std::int64_t row_bytes_;
  std::int64_t sum_bytes_;
  std::int32_t source_ = 0;
  std::int64_t first_ = 0;  ///< number of the source's token 0 among those of all sources
  TokenRoutes routes_;
  std::vector<PutCount> to_node_;    ///< [N]
  std::vector<PutCount> from_node_;  ///< [N]
  std::vector<PutCount> to_rank_;    ///< [W]
  std::vector<PutCount> from_rank_;  ///< [W]
};

}  // namespace

std::vector<ExpertRankLoad> count_expert_load(const EPConfig& config,
                                              const EPDispatchOptions& dispatch,
                                              std::span<const std::vector<std::int32_t>> ids) {
  LoadCount count(config, dispatch);
  for (std::int32_t r = 0; r < config.world_size; ++r) count.count_source(r, ids[r]);
  return count.take();
}

}  // namespace waybill::detail
