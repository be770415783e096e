#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/planner/expert_balance.h"

namespace waybill {
namespace {

constexpr auto in_placement = "plan_expert_placement";

/// Experts of one layer in the slots of some ranks.
class Placement {
 public:
  Placement(std::span<const double> loads, std::int32_t num_ranks, std::int32_t slots_per_rank)
      : loads_(loads),
        num_ranks_(num_ranks),
        slots_per_rank_(slots_per_rank),
        slots_(std::int64_t{num_ranks} * slots_per_rank, -1),
        copies_(loads.size(), 0),
        rank_loads_(num_ranks, 0.0),
        held_(num_ranks * loads.size(), 0) {}

  [[nodiscard]] const std::vector<std::int32_t>& slots() const { return slots_; }
  [[nodiscard]] double rank_load(std::int32_t rank) const { return rank_loads_[rank]; }
  [[nodiscard]] double fullest() const { return std::ranges::max(rank_loads_); }
  [[nodiscard]] std::int32_t copies(std::int32_t expert) const { return copies_[expert]; }

  void set(std::vector<std::int32_t> slots) {
    slots_ = std::move(slots);
    update();
  }
  /// Chooses copies of `experts` and places them all.
  void fill(std::span<const std::int32_t> experts) {
    const std::vector<std::int32_t> extra = choose_copies(experts);
    // Fewer copies may pack better: 4 of each of two experts lie on 8 ranks, 5 do not.
    std::vector<std::pair<double, std::int64_t>> tried;
    for (std::int64_t count = std::ssize(extra); count >= 0; --count) {
      pack(experts, std::span(extra).first(count));
      tried.emplace_back(fullest(), -count);
    }
    std::ranges::sort(tried);
    constexpr std::int64_t num_improved = 2;
    if (std::ssize(tried) > num_improved) tried.resize(num_improved);
    tried.emplace_back(0, -std::ssize(extra));
    std::vector<std::int32_t> best;
    double least = std::numeric_limits<double>::infinity();
    for (const auto& [load, count] : tried) {
      pack(experts, std::span(extra).first(-count));
      improve(-1);
      if (fullest() >= least) continue;
      least = fullest();
      best = slots_;
    }
    set(std::move(best));
  }

  /// Exchanges that lower the fullest rank's load, while experts that come to a rank are at most
  /// `max_moves`; -1: any number. Returns how many came.
  std::int64_t improve(std::int64_t max_moves) {
    std::int64_t moves = 0;
    while (max_moves < 0 || moves < max_moves) {
      const Change best = best_change(max_moves < 0 ? -1 : max_moves - moves);
      if (best.slot < 0) break;
      slots_[best.slot] = best.expert;
      if (best.other >= 0) slots_[best.other] = best.other_expert;
      moves += best.moves;
      update();
    }
    return moves;
  }

 private:
  /// A change of at most two slots: each gets another expert, or none.
  struct Change {
    std::int64_t slot = -1, other = -1;
    std::int32_t expert = -1, other_expert = -1;
    std::int64_t moves = 0;
    double fullest = 0;  ///< afterwards, of the ranks that it changes
  };

  [[nodiscard]] std::int32_t rank_of(std::int64_t slot) const {
    return static_cast<std::int32_t>(slot / slots_per_rank_);
  }
  [[nodiscard]] double share(std::int32_t expert, std::int32_t copies) const {
    return expert < 0 ? 0.0 : loads_[expert] / copies;
  }
  [[nodiscard]] double share(std::int32_t expert) const {
    return expert < 0 ? 0.0 : share(expert, copies_[expert]);
  }
  [[nodiscard]] bool holds(std::int32_t rank, std::int32_t expert) const {
    return held_[std::int64_t{rank} * std::ssize(loads_) + expert] != 0;
  }
  void put(std::int64_t slot, std::int32_t expert) {
    slots_[slot] = expert;
    held_[std::int64_t{rank_of(slot)} * std::ssize(loads_) + expert] = 1;
  }
  void update() {
    std::ranges::fill(copies_, 0);
    for (const std::int32_t expert : slots_) {
      if (expert >= 0) ++copies_[expert];
    }
    std::ranges::fill(rank_loads_, 0.0);
    std::ranges::fill(held_, std::uint8_t{0});
    for (std::int64_t s = 0; s < std::ssize(slots_); ++s) {
      if (slots_[s] < 0) continue;
      put(s, slots_[s]);
      rank_loads_[rank_of(s)] += share(slots_[s]);
    }
  }

  /// Which experts get another copy, in order: always the one with the largest load per copy, while
  /// there are slots, and at most one per rank.
  [[nodiscard]] std::vector<std::int32_t> choose_copies(std::span<const std::int32_t> experts) {
    std::vector<std::int32_t> extra;
    for (const std::int32_t e : experts) copies_[e] = 1;
    while (std::ssize(experts) + std::ssize(extra) < std::ssize(slots_)) {
      std::int32_t most = -1;
      for (const std::int32_t e : experts) {
        if (copies_[e] < num_ranks_ && (most < 0 || share(e) > share(most))) most = e;
      }
      if (most < 0 || loads_[most] == 0) break;
      ++copies_[most];
      extra.push_back(most);
    }
    return extra;
  }

  /// Packs the experts, with copies of `extra`: largest load per copy first, to the emptiest rank.
  void pack(std::span<const std::int32_t> experts, std::span<const std::int32_t> extra) {
    std::vector<std::int32_t> items(experts.begin(), experts.end());
    items.insert(items.end(), extra.begin(), extra.end());
    for (const std::int32_t e : experts) copies_[e] = 0;
    for (const std::int32_t e : items) ++copies_[e];
    std::ranges::sort(items, {}, [&](std::int32_t e) { return std::tuple(-share(e), e); });
    std::ranges::fill(slots_, -1);
    std::ranges::fill(rank_loads_, 0.0);
    std::ranges::fill(held_, std::uint8_t{0});
    for (const std::int32_t expert : items) {
      const std::int64_t slot = free_slot(expert);
      if (slot < 0) continue;  // only ranks that hold it have room: the slot stays empty
      put(slot, expert);
      rank_loads_[rank_of(slot)] += share(expert);
    }
    update();
  }

  /// A free slot of the emptiest rank that has one and does not hold the expert; -1: none.
  [[nodiscard]] std::int64_t free_slot(std::int32_t expert) const {
    std::int64_t best = -1;
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      if (best >= 0 && rank_loads_[r] >= rank_loads_[rank_of(best)]) continue;
      if (holds(r, expert)) continue;
      const auto first = slots_.begin() + std::int64_t{r} * slots_per_rank_;
      const auto free = std::find(first, first + slots_per_rank_, -1);
      if (free != first + slots_per_rank_) best = free - slots_.begin();
    }
    return best;
  }

  /// The exchange of an expert of `from` for one of another rank, or for an empty slot, after which
  /// the fuller of the two has least.
  [[nodiscard]] Change best_swap(std::int32_t from) const {
    Change best{.fullest = rank_loads_[from]};
    const std::int64_t first = std::int64_t{from} * slots_per_rank_;
    for (std::int64_t s = first; s < first + slots_per_rank_; ++s) {
      if (slots_[s] < 0) continue;
      for (std::int64_t o = 0; o < std::ssize(slots_); ++o) {
        const std::int32_t rank = rank_of(o);
        const double moved = share(slots_[s]) - share(slots_[o]);
        if (rank == from || moved <= 0) continue;
        const double fuller = std::max(rank_loads_[from] - moved, rank_loads_[rank] + moved);
        if (fuller >= best.fullest || holds(rank, slots_[s])) continue;
        if (slots_[o] >= 0 && holds(from, slots_[o])) continue;
        best = {s, o, slots_[o], slots_[s], slots_[o] < 0 ? 1 : 2, fuller};
      }
    }
    return best;
  }

  /// The other copy of an expert of `from`, in place of a copy of which there are several or in an
  /// empty slot, that lowers the fullest rank's load most.
  [[nodiscard]] Change best_copy(std::int32_t from) const {
    Change best{.fullest = rank_loads_[from]};
    const std::int64_t first = std::int64_t{from} * slots_per_rank_;
    for (std::int64_t s = first; s < first + slots_per_rank_; ++s) {
      const std::int32_t expert = slots_[s];
      if (expert < 0 || copies_[expert] >= num_ranks_) continue;
      for (std::int64_t o = 0; o < std::ssize(slots_); ++o) {
        const std::int32_t gone = slots_[o];
        if (gone == expert || (gone >= 0 && copies_[gone] < 2)) continue;
        if (holds(rank_of(o), expert)) continue;
        const double fullest = fullest_with(expert, o, best.fullest);
        if (fullest < best.fullest) best = {o, -1, expert, -1, 1, fullest};
      }
    }
    return best;
  }

  /// A swap that lowers the fullest rank's load, else another copy that does, else a swap that
  /// lowers the load of the next rank that can be lowered; of at most `max_moves`, -1: any.
  [[nodiscard]] Change best_change(std::int64_t max_moves) const {
    std::vector<std::int32_t> order(num_ranks_);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](std::int32_t r) { return -rank_loads_[r]; });
    // A difference below this is noise of the sums.
    const double noise = 1e-12 * rank_loads_[order.front()];
    const auto helps = [&](const Change& change, std::int32_t from) {
      return change.slot >= 0 && change.fullest < rank_loads_[from] - noise &&
             (max_moves < 0 || change.moves <= max_moves);
    };
    for (const std::int32_t from : order) {
      const Change swap = best_swap(from);
      const bool swap_helps = helps(swap, from);
      if (from == order.front()) {
        const double others = num_ranks_ > 1 ? rank_loads_[order[1]] : 0.0;
        if (swap_helps && std::max(swap.fullest, others) < rank_loads_[from] - noise) return swap;
        const Change copy = best_copy(from);
        if (helps(copy, from)) return copy;
      }
      if (swap_helps) return swap;
      if (max_moves >= 0) break;  // moves are for the fullest rank
    }
    return {};
  }

  /// The fullest rank's load if `slot` held another copy of `expert` in place of its own; `limit`
  /// if that is not below it.
  [[nodiscard]] double fullest_with(std::int32_t expert, std::int64_t slot, double limit) const {
    const std::int32_t gone = slots_[slot];
    const double less = share(expert) - share(expert, copies_[expert] + 1);
    const double more = gone < 0 ? 0.0 : share(gone, copies_[gone] - 1) - share(gone);
    double fullest = 0;
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      double load = rank_loads_[r];
      if (holds(r, expert)) load -= less;
      if (r == rank_of(slot)) {
        load += share(expert, copies_[expert] + 1) - share(gone);
      } else if (gone >= 0 && holds(r, gone)) {
        load += more;
      }
      fullest = std::max(fullest, load);
      if (fullest >= limit) return limit;
    }
    return fullest;
  }

  std::span<const double> loads_;
  std::int32_t num_ranks_, slots_per_rank_;
  std::vector<std::int32_t> slots_;   // [ranks, slots_per_rank]
  std::vector<std::int32_t> copies_;  // [experts]
  std::vector<double> rank_loads_;
  std::vector<std::uint8_t> held_;  // [ranks, experts]
};

/// Groups to nodes: the largest first to the emptiest node that has room, then exchanges.
std::vector<std::vector<std::int32_t>> experts_of_nodes(std::span<const double> loads,
                                                        const ExpertPlacementOptions& options) {
  const auto num_experts = static_cast<std::int32_t>(loads.size());
  const std::int32_t group_size = num_experts / options.num_groups;
  std::vector<double> group_loads(options.num_groups, 0.0);
  for (std::int32_t e = 0; e < num_experts; ++e) group_loads[e / group_size] += loads[e];
  std::vector<std::int32_t> groups(options.num_groups);
  std::iota(groups.begin(), groups.end(), 0);
  Placement nodes(group_loads, options.num_nodes, options.num_groups / options.num_nodes);
  nodes.fill(groups);
  std::vector<std::vector<std::int32_t>> experts(options.num_nodes);
  const auto per_node = std::ssize(nodes.slots()) / options.num_nodes;
  for (std::int64_t s = 0; s < std::ssize(nodes.slots()); ++s) {
    for (std::int32_t i = 0; i < group_size; ++i)
      experts[s / per_node].push_back(nodes.slots()[s] * group_size + i);
  }
  for (std::vector<std::int32_t>& of_node : experts) std::ranges::sort(of_node);
  return experts;
}

/// Places the experts of one layer.
std::vector<std::int32_t> place(std::span<const double> loads,
                                const ExpertPlacementOptions& options,
                                std::int32_t slots_per_rank) {
  std::vector<std::vector<std::int32_t>> experts(1);
  if (options.num_groups > 0) {
    experts = experts_of_nodes(loads, options);
  } else {
    experts[0].resize(loads.size());
    std::iota(experts[0].begin(), experts[0].end(), 0);
  }
  std::vector<std::int32_t> slots;
  for (const std::vector<std::int32_t>& of_node : experts) {
    Placement node(loads, options.num_ranks / static_cast<std::int32_t>(experts.size()),
                   slots_per_rank);
    node.fill(of_node);
    slots.insert(slots.end(), node.slots().begin(), node.slots().end());
  }
  return slots;
}

/// Ranks of a node change places, and slots of a rank, so that much of `present` stays.
void keep_places(const ExpertPlacementOptions& options, std::int32_t slots_per_rank,
                 std::span<const std::int32_t> present, std::vector<std::int32_t>& slots) {
  const std::int32_t per_node =
      options.num_groups > 0 ? options.num_ranks / options.num_nodes : options.num_ranks;
  const auto row = [&](const auto& table, std::int32_t rank) {
    return std::span(table).subspan(std::int64_t{rank} * slots_per_rank, slots_per_rank);
  };
  std::vector<std::int32_t> result(slots.size(), -1);
  std::vector<bool> placed(options.num_ranks, false), taken(options.num_ranks, false);
  const auto common = [&](std::int32_t planned, std::int32_t rank) {
    return std::ranges::count_if(row(slots, planned), [&](std::int32_t e) {
      return e >= 0 && std::ranges::find(row(present, rank), e) != row(present, rank).end();
    });
  };
  for (std::int32_t i = 0; i < options.num_ranks; ++i) {
    std::tuple<std::int64_t, std::int32_t, std::int32_t> best{-1, 0, 0};
    for (std::int32_t planned = 0; planned < options.num_ranks; ++planned) {
      for (std::int32_t rank = 0; rank < options.num_ranks && !placed[planned]; ++rank) {
        if (taken[rank] || planned / per_node != rank / per_node) continue;
        best = std::max(best, {common(planned, rank), -planned, -rank});
      }
    }
    const auto [count, planned, rank] =
        std::tuple(std::get<0>(best), -std::get<1>(best), -std::get<2>(best));
    placed[planned] = taken[rank] = true;
    auto to = std::span(result).subspan(std::int64_t{rank} * slots_per_rank, slots_per_rank);
    std::vector<std::int32_t> others;
    for (const std::int32_t e : row(slots, planned)) {
      const auto found = std::ranges::find(row(present, rank), e);
      if (e >= 0 && found != row(present, rank).end()) {
        to[found - row(present, rank).begin()] = e;
      } else if (e >= 0) {
        others.push_back(e);
      }
    }
    auto place = to.begin();
    for (const std::int32_t e : others) *std::find(place, to.end(), -1) = e;
  }
  slots = std::move(result);
}

std::int32_t check(std::span<const double> loads, std::int64_t num_layers, std::int32_t num_experts,
                   const ExpertPlacementOptions& o) {
  require(num_experts >= 1, in_placement, ": num_experts = ", num_experts, ", expected >= 1");
  require(num_layers >= 0 && std::ssize(loads) == num_layers * num_experts, in_placement,
          ": loads has ", loads.size(), " numbers, expected ", num_layers, " layers x ",
          num_experts, " experts");
  require(o.num_ranks >= 1, in_placement, ": num_ranks = ", o.num_ranks, ", expected >= 1");
  require(o.slots_per_rank > 0 || num_experts % o.num_ranks == 0, in_placement,
          ": slots_per_rank is needed where ", o.num_ranks, " ranks do not divide ", num_experts,
          " experts");
  const std::int32_t slots = o.slots_per_rank > 0 ? o.slots_per_rank : num_experts / o.num_ranks;
  const std::int64_t least = (std::int64_t{num_experts} + o.num_ranks - 1) / o.num_ranks;
  require(o.slots_per_rank >= 0 && least <= slots && slots <= num_experts, in_placement,
          ": slots_per_rank = ", o.slots_per_rank, ", expected ", least, "..", num_experts, ": ",
          num_experts, " experts on ", o.num_ranks, " ranks, none twice on one");
  require(o.num_nodes >= 1 && o.num_ranks % o.num_nodes == 0, in_placement,
          ": num_nodes = ", o.num_nodes, ", expected a divisor of the ", o.num_ranks, " ranks");
  require(o.num_groups >= 0 && (o.num_groups == 0 || (num_experts % o.num_groups == 0 &&
                                                      o.num_groups % o.num_nodes == 0)),
          in_placement, ": num_groups = ", o.num_groups, ", expected a divisor of ", num_experts,
          " experts and a multiple of ", o.num_nodes, " nodes");
  for (std::int64_t i = 0; i < std::ssize(loads); ++i) {
    require(loads[i] >= 0 && loads[i] <= 0x1p53, in_placement, ": load of layer ", i / num_experts,
            ", expert ", i % num_experts, " is ", loads[i], ", expected 0 to 2^53");
  }
  require(o.max_moves >= -1, in_placement, ": max_moves = ", o.max_moves, ", expected >= 0");
  require(o.max_moves < 0 || !o.present.empty(), in_placement, ": max_moves needs present");
  return slots;
}

void check_present(std::span<const std::int32_t> present, std::int32_t num_experts,
                   std::int32_t slots_per_rank, std::int64_t layer) {
  std::vector<std::int64_t> last_rank(num_experts, -1);
  for (std::int64_t s = 0; s < std::ssize(present); ++s) {
    const std::int32_t expert = present[s];
    require(expert >= -1 && expert < num_experts, in_placement, ": present of layer ", layer,
            ", rank ", s / slots_per_rank, " has expert ", expert, ", expected -1 to ",
            num_experts - 1);
    if (expert < 0) continue;
    require(last_rank[expert] != s / slots_per_rank, in_placement, ": present of layer ", layer,
            ", rank ", s / slots_per_rank, " has expert ", expert, " twice");
    last_rank[expert] = s / slots_per_rank;
  }
  const auto missing = std::ranges::find(last_rank, -1);
  require(missing == last_rank.end(), in_placement, ": present of layer ", layer, " has no expert ",
          missing - last_rank.begin());
}

}  // namespace

ExpertPlacement plan_expert_placement(std::span<const double> loads, std::int64_t num_layers,
                                      std::int32_t num_experts,
                                      const ExpertPlacementOptions& options) {
  const std::int32_t slots_per_rank = check(loads, num_layers, num_experts, options);
  const std::int64_t per_layer = std::int64_t{options.num_ranks} * slots_per_rank;
  require(options.present.empty() || std::ssize(options.present) == num_layers * per_layer,
          in_placement, ": present has ", options.present.size(), " slots, expected ", num_layers,
          " x ", options.num_ranks, " x ", slots_per_rank);
  require(options.max_moves < 0 || options.num_groups == 0, in_placement,
          ": max_moves with num_groups is not supported");
  ExpertPlacement result;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    const auto layer_loads = loads.subspan(layer * num_experts, num_experts);
    Placement placement(layer_loads, options.num_ranks, slots_per_rank);
    if (options.present.empty()) {
      placement.set(place(layer_loads, options, slots_per_rank));
    } else {
      const auto present = options.present.subspan(layer * per_layer, per_layer);
      check_present(present, num_experts, slots_per_rank, layer);
      std::vector<std::int32_t> slots(present.begin(), present.end());
      if (options.max_moves < 0) {
        slots = place(layer_loads, options, slots_per_rank);
        keep_places(options, slots_per_rank, present, slots);
      }
      placement.set(std::move(slots));
      if (options.max_moves >= 0) placement.improve(options.max_moves);
    }
    const std::vector<std::int32_t>& slots = placement.slots();
    std::int32_t moves = 0;
    for (std::int64_t s = 0; s < per_layer && !options.present.empty(); ++s) {
      const auto row = options.present.subspan(
          layer * per_layer + s / slots_per_rank * slots_per_rank, slots_per_rank);
      if (slots[s] >= 0 && std::ranges::find(row, slots[s]) == row.end()) ++moves;
    }
    result.slots.insert(result.slots.end(), slots.begin(), slots.end());
    for (std::int32_t e = 0; e < num_experts; ++e) result.copies.push_back(placement.copies(e));
    for (std::int32_t r = 0; r < options.num_ranks; ++r)
      result.rank_loads.push_back(placement.rank_load(r));
    result.moves.push_back(moves);
  }
  return result;
}

}  // namespace waybill
