#include "waybill/cost_model/predict_experts.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/batch_bytes.h"
#include "core/checks.h"
#include "moe/input_checks.h"
#include "moe/token_routes.h"
#include "planner/node_routes.h"
#include "waybill/core/error.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {

std::string_view to_string(ExpertPath path) {
  return path == ExpertPath::waiting ? "waiting" : "pipelined";
}

void ExpertCosts::check(const char* who) const {
  detail::check_at_least(who, "costs.num_sms", num_sms, 1);
  for (const auto& [field, got, zero_too] :
       {std::tuple{"count_seconds", count_seconds, true},
        {"count_token_seconds", count_token_seconds, true},
        {"plan_seconds", plan_seconds, true},
        {"plan_rank_seconds", plan_rank_seconds, true},
        {"plan_count_seconds", plan_count_seconds, true},
        {"sum_bytes_per_second", sum_bytes_per_second, false},
        {"copy_bytes_per_second", copy_bytes_per_second, false},
        {"combine_block_bytes_per_second", combine_block_bytes_per_second, false},
        {"kernel_seconds", kernel_seconds, true},
        {"last_row_seconds", last_row_seconds, true},
        {"put_seconds", put_seconds, true},
        {"path_bytes_per_second", path_bytes_per_second, true}}) {
    (zero_too ? detail::check_not_negative : detail::check_positive)(who, concat("costs.", field),
                                                                     got);
  }
}

double ExpertCosts::planning_seconds(const EPConfig& config) const {
  const auto ranks = static_cast<double>(config.world_size);
  return plan_seconds + ranks * (plan_rank_seconds + config.num_experts * plan_count_seconds);
}

void ExpertCostOptions::check(const char* who) const {
  require(!push_combine, who,
          ": push_combine = true, expected false: combines pull since 0.2, and ",
          "the option goes in 0.3");
  links.check(who);
  HardwareFacts hardware;
  hardware.message_seconds = message_seconds;
  StepOptions{.hardware = hardware, .costs = step}.check(who);
  costs.check(who);
}

namespace {

/// Tokens of which a put carries adjacent ones, at most.
constexpr std::int64_t put_tokens = 32;

/// The part of a rank in a dispatch, in rows. A combine moves the same ones the other way.
struct ExpertRankLoad {
  std::int64_t tokens = 0;
  std::int64_t computed = 0;    ///< topk slots of its experts
  std::int64_t received = 0;    ///< tokens, its own among them
  std::int64_t kept = 0;        ///< the part of these that it has as their home or forwarder
  std::int64_t kept_slots = 0;  ///< their topk slots
  LinkBytes per_node;           ///< rows over its links: a row for each node, then for each rank
  LinkBytes slots;              ///< the same: a row for each node, inside it for each topk slot
  LinkBytes straight;           ///< the same: a row for each rank, wherever it is
  /// Rows from other nodes that it hands on, and that it keeps.
  std::int64_t forwarded = 0;
  std::int64_t forwarded_slots = 0;
  std::int64_t kept_of_others = 0;
  std::int64_t computed_of_others = 0;  ///< topk slots of its experts, of tokens of other nodes
  std::int64_t puts_out = 0;            ///< puts of a dispatch, per node
  std::int64_t puts_back = 0;           ///< puts of a combine: sums of other nodes' tokens
  std::int64_t runs_out = 0;  ///< puts of a low latency dispatch: adjacent tokens for a rank
  std::int64_t runs_back = 0;
};

class LoadCount {
 public:
  LoadCount(const EPConfig& config, const EPDispatchOptions& dispatch)
      : config_(config),
        loads_(config.world_size),
        parts_(scale_row_bytes(config, dispatch) > 0 ? 2 : 1),
        row_bytes_(payload_row_bytes(config, dispatch)),
        sum_bytes_(config.hidden * dtype_bytes(config.token_dtype)),
        routes_(config, 0),
        to_node_(config.num_nodes(), -2),
        from_node_(config.num_nodes(), -2),
        to_rank_(config.world_size, -2),
        from_rank_(config.world_size, -2) {}

  /// Numbers of tokens tell the last put of one source from that of another: clearing them would
  /// take the square of the ranks.
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

  [[nodiscard]] const std::vector<ExpertRankLoad>& loads() const { return loads_; }

 private:
  [[nodiscard]] bool is_other_node(std::int32_t rank) const {
    return rank / config_.local_world_size != source_ / config_.local_world_size;
  }

  /// Counts puts from one source to one peer: runs of tokens, cut at every 32nd and where a put
  /// would get too long.
  /// @param last number of the token before, among those of all sources
  /// @return whether the token begins a put. Tokens ascend.
  [[nodiscard]] bool begins_put(std::int64_t& last, std::int64_t token, std::int64_t bytes) const {
    const std::int64_t step =
        std::clamp<std::int64_t>(detail::max_put_bytes / bytes, 1, put_tokens);
    const bool begins = first_ + token != last + 1 || token % put_tokens % step == 0;
    last = first_ + token;
    return begins;
  }

  void count_slot(std::int64_t token, const TopkRoute& route) {
    ExpertRankLoad& home = loads_[source_];
    ExpertRankLoad& forwarder = loads_[route.forwarder];
    ExpertRankLoad& there = loads_[route.rank];
    const bool crosses = is_other_node(route.rank);
    ++there.computed;
    if (crosses) ++there.computed_of_others;
    if (route.to_node) {
      for (LinkBytes ExpertRankLoad::*rows : {&ExpertRankLoad::per_node, &ExpertRankLoad::slots}) {
        ++(home.*rows).network_out;
        ++(forwarder.*rows).network_in;
      }
      const std::size_t node = route.forwarder / config_.local_world_size;
      if (begins_put(to_node_[node], token, row_bytes_)) home.puts_out += parts_;
      if (begins_put(from_node_[node], token, sum_bytes_)) ++forwarder.puts_back;
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
    if (begins_put(to_rank_[route.rank], token, row_bytes_)) home.runs_out += parts_;
    if (begins_put(from_rank_[route.rank], token, sum_bytes_)) ++there.runs_back;
  }

  const EPConfig& config_;
  std::vector<ExpertRankLoad> loads_;
  std::int64_t parts_;  ///< rows, and their scales
  std::int64_t row_bytes_;
  std::int64_t sum_bytes_;
  std::int32_t source_ = 0;
  std::int64_t first_ = 0;  ///< number of the source's token 0 among those of all sources
  TokenRoutes routes_;
  // Numbers of the last tokens that went there, or back from there.
  std::vector<std::int64_t> to_node_;    ///< [N]
  std::vector<std::int64_t> from_node_;  ///< [N]
  std::vector<std::int64_t> to_rank_;    ///< [W]
  std::vector<std::int64_t> from_rank_;  ///< [W]
};

/// A pipelined combine sums in at most so many pieces, of at least so many tokens.
constexpr std::int64_t max_sum_pieces = 4;
constexpr std::int64_t sum_piece_tokens = 2048;

double as_double(std::int64_t value) { return static_cast<double>(value); }

LinkBytes bytes_of(const LinkBytes& rows, std::int64_t row_bytes, bool back) {
  LinkBytes bytes;
  for (const detail::LinkField& link : detail::link_fields)
    bytes.*link.bytes = rows.*link.bytes * row_bytes;
  return back ? detail::reversed(bytes) : bytes;
}

/// The time of a call on one rank.
struct RankTime {
  LinkBytes links;
  std::int64_t puts = 0;
  double begin = 0;
  double overlapped = 0;
  double network = 0;
  double nvlink = 0;
  double blocks = 0;
  double end = 0;

  [[nodiscard]] double seconds() const {
    return begin + std::max(network, overlapped + std::max(nvlink, blocks)) + end;
  }
};

class ExpertClock {
 public:
  ExpertClock(const EPConfig& config, const EPDispatchOptions& dispatch,
              const ExpertCostOptions& options)
      : config_(config),
        costs_(options.costs),
        links_(options.links),
        nodes_(config.num_nodes()),
        counted_kernels_(is_pipelined() ? 4 : 6),
        cached_kernels_(is_pipelined() ? 3 : 4),
        combine_kernels_(is_pipelined() ? 6 : 7),
        post_(options.step.network_post_seconds),
        latency_(nodes_ > 1 ? options.step.network_message_seconds : 0),
        pull_speed_(links_.nvlink_bytes_per_second * options.step.pull_share),
        row_bytes_(payload_row_bytes(config, dispatch) + scale_row_bytes(config, dispatch)),
        sum_bytes_(config.hidden * dtype_bytes(config.token_dtype)),
        path_sms_(nodes_ > 1 ? std::clamp(costs_.num_sms / 4, 1, 8) : 0),
        row_sms_(std::max(1, costs_.num_sms - path_sms_)) {
    HardwareFacts hardware;
    hardware.nvlink_bytes_per_second = links_.nvlink_bytes_per_second;
    hardware.network_bytes_per_second = links_.network_bytes_per_second;
    hardware.message_seconds = options.message_seconds;
    message_ = options.message_seconds;
    signals_ = call_overhead(config.topology(), hardware, options.step).seconds;
    const Topology node{config.local_world_size, config.local_world_size};
    if (dispatch.spare_experts > 0) planning_ = costs_.planning_seconds(config);
    counts_ = counting_overhead(node, config.num_experts / nodes_, hardware, options.step).seconds -
              call_overhead(node, hardware, options.step).seconds;
  }

  [[nodiscard]] RankTime time(ExpertCallKind kind, const ExpertRankLoad& load) const {
    switch (kind) {
      case ExpertCallKind::grouped_dispatch:
      case ExpertCallKind::cached_dispatch:
        return dispatch(load, kind == ExpertCallKind::grouped_dispatch);
      case ExpertCallKind::compact_combine:
      case ExpertCallKind::summed_combine:
      case ExpertCallKind::grouped_combine:
        return combine(load, kind);
      case ExpertCallKind::low_latency_dispatch:
        return low_latency_dispatch(load);
      case ExpertCallKind::low_latency_combine:
        return low_latency_combine(load);
    }
    return {};
  }

 private:
  [[nodiscard]] bool is_pipelined() const { return costs_.path == ExpertPath::pipelined; }
  [[nodiscard]] bool is_mapped() const { return costs_.path_bytes_per_second > 0; }

  [[nodiscard]] double stored_by(int sms, double bytes) const {
    return bytes / (sms * links_.block_bytes_per_second);
  }
  /// The same of a combine that pulls: bytes loaded and stored.
  [[nodiscard]] double combined_by(int sms, double bytes) const {
    return bytes / (sms * costs_.combine_block_bytes_per_second);
  }
  [[nodiscard]] double summed(std::int64_t rows) const {
    return as_double(rows * sum_bytes_) / costs_.sum_bytes_per_second;
  }

  /// Links and puts of `time.links`; a path of mapped memory takes part of NVLink.
  void set_links(RankTime& time, double nvlink_speed) const {
    double inside = as_double(std::max(time.links.nvlink_in, time.links.nvlink_out));
    const double across = as_double(std::max(time.links.network_in, time.links.network_out));
    if (is_mapped()) inside = as_double(std::max(time.links.in(), time.links.out()));
    time.nvlink = inside / nvlink_speed;
    if (nodes_ > 1 && across > 0) {
      time.network = std::max(is_mapped() ? 0.0 : across / links_.network_bytes_per_second,
                              posting(time.puts, as_double(time.links.network_out)));
    }
  }

  /// The time of the blocks that put.
  [[nodiscard]] double posting(std::int64_t puts, double bytes) const {
    const double copy =
        bytes / (is_mapped() ? costs_.path_bytes_per_second : links_.network_bytes_per_second);
    if (is_pipelined()) {
      return as_double(puts) * post_ / std::min(nodes_ - 1, path_sms_) +
             (is_mapped() ? copy / path_sms_ : 0);
    }
    const double wait = is_mapped() ? costs_.put_seconds : post_ + 2 * latency_;
    return (as_double(puts) * wait + copy) / path_sms_;
  }

  /// A piece on its way through the node.
  [[nodiscard]] double piece() const {
    return as_double(detail::max_put_bytes) / links_.nvlink_bytes_per_second + message_;
  }

  [[nodiscard]] double ids_seconds() const {
    const double bytes = as_double(config_.max_tokens * config_.topk * 4) * (nodes_ - 1);
    return latency_ +
           bytes / (is_mapped() ? costs_.path_bytes_per_second * path_sms_
                                : links_.network_bytes_per_second) +
           (counted_kernels_ - cached_kernels_) * costs_.kernel_seconds;
  }

  [[nodiscard]] RankTime dispatch(const ExpertRankLoad& load, bool grouped) const {
    RankTime time;
    time.links = bytes_of(load.per_node, row_bytes_, false);
    time.puts = load.puts_out;
    time.begin = signals_;
    if (grouped) {
      const bool goes_on = is_pipelined() && nodes_ > 1;  // rows leave while tokens are counted
      const double counting =
          costs_.count_seconds +
          nodes_ * (counts_ + as_double(load.tokens) * costs_.count_token_seconds / costs_.num_sms);
      (goes_on ? time.overlapped : time.begin) += counting;
      if (planning_ > 0) time.begin += counting + planning_;  // rows wait for the plan
    }
    const std::int64_t copies = grouped ? load.computed - load.received : 0;
    const double row = as_double(row_bytes_);
    time.blocks =
        stored_by(row_sms_, as_double(load.per_node.nvlink_out + load.kept + copies) * row);
    set_links(time, links_.nvlink_bytes_per_second);
    if (nodes_ == 1) {
      if (!grouped) time.begin += costs_.kernel_seconds;  // it waits for all ranks
      return time;
    }
    time.begin += latency_ + cached_kernels_ * costs_.kernel_seconds;
    if (!is_pipelined() || !is_mapped())  // a card reads registered memory alone
      time.begin += 2 * as_double(load.tokens) * row / costs_.copy_bytes_per_second;
    if (grouped) time.begin += ids_seconds();
    if (is_pipelined()) {
      time.end = piece();
      return time;
    }
    // Rows from the last node, when all of them are there.
    const double part = 1.0 / (nodes_ - 1);
    const std::int64_t of_others = load.forwarded + load.kept_of_others;
    const std::int64_t copied =
        grouped && load.received > 0 ? copies * load.computed_of_others / load.computed : 0;
    time.end = part * std::max(as_double(load.forwarded) * row / links_.nvlink_bytes_per_second,
                               stored_by(row_sms_, as_double(of_others + copied) * row));
    return time;
  }

  [[nodiscard]] RankTime combine(const ExpertRankLoad& load, ExpertCallKind kind) const {
    RankTime time;
    const bool sums = kind != ExpertCallKind::grouped_combine;
    const LinkBytes& rows = sums ? load.per_node : load.slots;
    time.links = bytes_of(rows, sum_bytes_, true);
    time.puts = load.puts_back;
    time.begin = signals_;
    if (kind == ExpertCallKind::summed_combine) {
      const double least = nodes_ == 1 ? costs_.kernel_seconds : 0;  // the pass is a kernel
      time.begin += std::max(least, summed(load.computed + load.received));
    }
    const double row = as_double(sum_bytes_);
    // A rank pulls what it has sent, adds what it has kept, and writes its tokens once.
    const std::int64_t pulled = rows.nvlink_out + (sums ? load.kept : load.kept_slots);
    time.blocks =
        combined_by(row_sms_, as_double(pulled + load.tokens + load.per_node.network_in) * row);
    set_links(time, pull_speed_);
    if (nodes_ == 1) return time;
    time.begin += combine_kernels_ * costs_.kernel_seconds;
    // Own sums, those of other nodes and the result; pipelined as they come.
    (is_pipelined() ? time.overlapped : time.end) +=
        summed(load.per_node.network_out + 2 * load.tokens);
    time.end += latency_ + (is_pipelined() ? piece() : 0);
    make_sums_first(load, sums ? load.forwarded : load.forwarded_slots, time);
    return time;
  }

  /// Sums of other nodes' tokens are made before any leaves; pipelined, a piece of them.
  void make_sums_first(const ExpertRankLoad& load, std::int64_t pulled, RankTime& time) const {
    std::int64_t pieces = 1;
    if (is_pipelined()) {
      pieces =
          std::clamp<std::int64_t>(load.per_node.network_in / sum_piece_tokens, 1, max_sum_pieces);
    }
    const auto row = as_double(sum_bytes_);
    const double link = as_double(pulled / pieces) * row / pull_speed_;
    const double blocks =
        combined_by(row_sms_, as_double((pulled + load.kept_of_others) / pieces) * row);
    const double lead = std::max(link, blocks);
    time.begin += lead;
    time.nvlink = std::max(0.0, time.nvlink - link);
    time.blocks = std::max(0.0, time.blocks - lead);
  }

  /// Rows and ids go at once, wherever their ranks are; all multiprocessors take part.
  [[nodiscard]] RankTime low_latency_dispatch(const ExpertRankLoad& load) const {
    RankTime time;
    time.links = bytes_of(load.straight, row_bytes_, false);
    time.puts = load.runs_out;
    time.begin = signals_ + latency_;
    const double row = as_double(row_bytes_);
    set_straight_links(time, links_.nvlink_bytes_per_second,
                       as_double(load.tokens * config_.topk * 8));
    time.blocks =
        stored_by(costs_.num_sms, as_double(load.straight.nvlink_out + load.computed) * row);
    time.end = costs_.last_row_seconds;
    return time;
  }

  [[nodiscard]] RankTime low_latency_combine(const ExpertRankLoad& load) const {
    RankTime time;
    time.links = bytes_of(load.straight, sum_bytes_, true);
    time.puts = load.runs_back;
    time.begin = signals_ + latency_ + summed(load.computed + load.received);
    set_straight_links(time, pull_speed_, 0);
    const std::int64_t added = load.straight.nvlink_out + load.straight.network_out + load.kept;
    time.blocks = combined_by(costs_.num_sms, as_double((added + load.tokens) * sum_bytes_));
    return time;
  }

  /// @param more bytes to every other rank
  void set_straight_links(RankTime& time, double nvlink_speed, double more) const {
    const LinkBytes& links = time.links;
    const auto near = static_cast<double>(config_.local_world_size - 1);
    const auto far = static_cast<double>(config_.world_size - config_.local_world_size);
    if (nodes_ == 1 || is_mapped()) {
      time.nvlink =
          (as_double(std::max(links.in(), links.out())) + more * (near + far)) / nvlink_speed;
      return;
    }
    time.nvlink =
        (as_double(std::max(links.nvlink_in, links.nvlink_out)) + more * near) / nvlink_speed;
    const double across = as_double(std::max(links.network_in, links.network_out)) + more * far;
    time.network = std::max(across / links_.network_bytes_per_second,
                            as_double(time.puts) * post_ / costs_.num_sms);
  }

  const EPConfig& config_;
  const ExpertCosts& costs_;
  const LinkSpeeds& links_;
  std::int32_t nodes_;
  // Kernels of a call over several nodes beyond those on one.
  int counted_kernels_;
  int cached_kernels_;
  int combine_kernels_;
  double post_;
  double latency_;
  double pull_speed_;
  std::int64_t row_bytes_;  ///< bytes of a dispatched row and its scales
  std::int64_t sum_bytes_;  ///< bytes of a combined row
  int path_sms_;
  int row_sms_;
  double message_ = 0;
  double planning_ = 0;  ///< for planning copies; 0: there are none
  double signals_ = 0;
  double counts_ = 0;
};

}  // namespace

std::string_view to_string(ExpertCallKind kind) {
  constexpr std::string_view names[] = {
      "grouped_dispatch", "cached_dispatch",      "compact_combine",    "summed_combine",
      "grouped_combine",  "low_latency_dispatch", "low_latency_combine"};
  return names[static_cast<std::size_t>(kind)];
}

std::vector<ExpertCallPrediction> predict_experts(const EPConfig& config,
                                                  const EPDispatchOptions& dispatch,
                                                  std::span<const std::vector<std::int32_t>> ids,
                                                  const ExpertCostOptions& options) {
  config.check("predict_experts");
  dispatch.check(config, "predict_experts");
  options.check("predict_experts");
  detail::check_ids("predict_experts", config, ids);
  std::vector<std::vector<std::int32_t>> places(ids.begin(), ids.end());
  if (dispatch.spare_experts > 0) (void)take_slots(config, dispatch, {}, places);
  const EPConfig slots = slot_config(config, dispatch);
  LoadCount count(slots, dispatch);
  for (std::int32_t r = 0; r < config.world_size; ++r) count.count_source(r, places[r]);
  const std::vector<ExpertRankLoad>& loads = count.loads();
  const ExpertClock clock(config, dispatch, options);
  std::vector<ExpertCallPrediction> calls(num_expert_calls);
  for (int k = 0; k < num_expert_calls; ++k) {
    ExpertCallPrediction& call = calls[k];
    call.kind = static_cast<ExpertCallKind>(k);
    for (std::size_t r = 0; r < loads.size(); ++r) {
      const RankTime time = clock.time(call.kind, loads[r]);
      call.links.push_back(time.links);
      call.puts.push_back(time.puts);
      if (r > 0 && time.seconds() <= call.seconds) continue;
      call.rank = static_cast<std::int32_t>(r);
      call.begin_seconds = time.begin;
      call.overlapped_seconds = time.overlapped;
      call.network_seconds = time.network;
      call.nvlink_seconds = time.nvlink;
      call.block_seconds = time.blocks;
      call.end_seconds = time.end;
      call.seconds = time.seconds();
    }
  }
  return calls;
}

}  // namespace waybill
