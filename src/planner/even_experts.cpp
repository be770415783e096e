#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "waybill/core/error.h"
#include "waybill/planner/expert_balance.h"

namespace waybill {
namespace {

constexpr auto in_even_experts = "even_experts";
constexpr std::int64_t max_exact = std::int64_t{1} << 53;
constexpr std::int64_t num_rungs = 32;

/// One way to bring all ranks down to a limit: see `settle` and `reuse`.
struct Way {
  bool reuse, spread, whole;
  bool near = false;
};
constexpr Way ways[] = {
    {true, true, false}, {false, true, false}, {false, false, false}, {false, false, true}};

}  // namespace

class EvenExpertsPlanner::State {
 public:
  State(std::int32_t num_ranks, std::int32_t num_experts, const EvenExpertsOptions& options);

  void plan(std::span<const std::int64_t> rows, EvenExperts& plan) {
    count(rows);
    const std::int64_t bound = lower_bound();
    const std::int64_t fullest = std::ranges::max(rank_rows_);
    // NaN and infinity are refused before; a product over the fullest changes nothing.
    const auto base = static_cast<std::int64_t>(
        std::min(static_cast<double>(bound) * limit_factor_, static_cast<double>(max_exact)));
    constexpr std::int64_t cube = (num_rungs - 1) * (num_rungs - 1) * (num_rungs - 1);
    const std::int64_t above = std::max<std::int64_t>(fullest - base, 0);
    bool done = false;
    for (std::int64_t rung = 0; rung < num_rungs && !done; ++rung) {
      const std::int64_t cubed = rung * rung * rung;
      const std::int64_t limit = base + above / cube * cubed + above % cube * cubed / cube;
      done = try_ways(limit);
    }
    send_home();
    plan.num_ranks = num_ranks_;
    plan.slots_per_rank = homes_ + spare_;
    const std::int64_t num_slots = std::int64_t{num_ranks_} * plan.slots_per_rank;
    plan.slots.resize(num_slots);
    plan.quotas.assign(num_slots, 0);
    plan.local_rows.assign(num_slots, 0);
    plan.first_row.assign(num_slots, 0);
    plan.weights_out.assign(num_ranks_, 0);
    plan.weights_in.assign(num_ranks_, 0);
    plan.max_rows = std::ranges::max(load_);
    plan.mean_rows = static_cast<double>(total_) / num_ranks_;
    plan.bound = bound;
    write_slots(plan);
    write_quotas(rows, plan);
  }

 private:
  struct Copy {
    std::int64_t rows;
    std::int32_t expert, rank;
    bool is_present;
  };

  void check(const EvenExpertsOptions& options) const {
    require(num_ranks_ >= 1, in_even_experts, ": num_ranks = ", num_ranks_, ", expected >= 1");
    require(num_experts_ >= 1 && num_experts_ % num_ranks_ == 0, in_even_experts,
            ": num_experts = ", num_experts_, ", expected a multiple of the ", num_ranks_,
            " ranks");
    require(spare_ >= 0 && spare_ <= num_experts_, in_even_experts, ": spare_experts = ", spare_,
            ", expected 0 to num_experts = ", num_experts_);
    require(min_rows_ >= 0, in_even_experts, ": min_rows = ", min_rows_, ", expected >= 0");
    require(limit_factor_ >= 1 && limit_factor_ < 1e9, in_even_experts, ": limit = ", limit_factor_,
            ", expected >= 1");
    require(alignment_ >= 1, in_even_experts, ": alignment = ", alignment_, ", expected >= 1");
    require(num_nodes_ >= 1 && num_ranks_ % num_nodes_ == 0, in_even_experts,
            ": num_nodes = ", num_nodes_, ", expected a divisor of num_ranks = ", num_ranks_);
    const auto slots = std::int64_t{num_ranks_} * spare_;
    require(options.present.empty() || std::ssize(options.present) == slots, in_even_experts,
            ": present has ", options.present.size(), " slots, expected ", num_ranks_, " x ",
            spare_);
    for (std::int64_t i = 0; i < std::ssize(options.present); ++i) {
      const std::int32_t expert = options.present[i];
      require(expert >= -1 && expert < num_experts_, in_even_experts, ": present of rank ",
              i / spare_, ", slot ", i % spare_, " is ", expert, ", expected -1 to ",
              num_experts_ - 1);
      require(expert < 0 || expert / homes_ != i / spare_, in_even_experts, ": present of rank ",
              i / spare_, ", slot ", i % spare_, " is ", expert, ", a home expert of this rank");
    }
  }

  void count(std::span<const std::int64_t> rows) {
    const std::int64_t cells = std::int64_t{num_ranks_} * num_experts_;
    require(std::ssize(rows) == cells, in_even_experts, ": rows has ", rows.size(),
            " numbers, expected ", num_ranks_, " x ", num_experts_);
    std::ranges::fill(expert_rows_, 0);
    std::int64_t any = 0;  // its sign tells of a negative number, its high bits of a large one
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      const std::int64_t* const from = rows.data() + std::int64_t{r} * num_experts_;
      for (std::int32_t e = 0; e < num_experts_; ++e) {
        any |= from[e];
        // Wraps only where a number is too large, which is an error below.
        expert_rows_[e] = static_cast<std::int64_t>(static_cast<std::uint64_t>(expert_rows_[e]) +
                                                    static_cast<std::uint64_t>(from[e]));
      }
    }
    if (any < 0 || any > max_exact) {
      for (std::int64_t i = 0; i < cells; ++i) {
        require(rows[i] >= 0 && rows[i] <= max_exact, in_even_experts, ": rows of rank ",
                i / num_experts_, " for expert ", i % num_experts_, " = ", rows[i],
                ", expected 0 to 2^53");
      }
    }
    // A giver's order is a product of rows and of weights that it sends.
    const std::int64_t copies = std::int64_t{num_ranks_} * spare_ + 1;
    const std::int64_t max_total =
        std::min(max_exact, std::numeric_limits<std::int64_t>::max() / copies);
    total_ = 0;
    for (const std::int64_t n : expert_rows_) {
      require(n >= 0 && n <= max_total && total_ <= max_total - n, in_even_experts,
              ": all rows are more than ", max_total);
      total_ += n;
    }
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      const auto first = expert_rows_.begin() + std::int64_t{r} * homes_;
      rank_rows_[r] = std::accumulate(first, first + homes_, std::int64_t{0});
    }
    mean_ = (total_ + num_ranks_ - 1) / num_ranks_;
  }

  [[nodiscard]] std::int64_t lower_bound() {
    rank_order_.resize(num_ranks_);
    std::iota(rank_order_.begin(), rank_order_.end(), 0);
    std::ranges::stable_sort(rank_order_, std::greater<>(),
                             [&](std::int32_t r) { return rank_rows_[r]; });
    std::int64_t bound = mean_, held = 0;
    for (std::int32_t k = 1; k < num_ranks_; ++k) {
      held += rank_rows_[rank_order_[k - 1]];
      const std::int64_t room = std::int64_t{spare_} * (num_ranks_ - k);
      const std::int64_t experts = std::int64_t{k} * homes_;
      if (room >= experts) continue;
      // The largest experts are at least average: most k need no sorting.
      const double kept = static_cast<double>(held) * static_cast<double>(experts - room) /
                          static_cast<double>(experts);
      if (kept < static_cast<double>(bound) * k * (1 - 1e-9)) continue;
      bound = std::max(bound, (kept_by_fullest(k, room) + k - 1) / k);
    }
    return bound;
  }

  /// The rows that the k fullest ranks keep if the others take their `room` largest experts.
  [[nodiscard]] std::int64_t kept_by_fullest(std::int32_t k, std::int64_t room) {
    sorted_.clear();
    for (std::int32_t i = 0; i < k; ++i) {
      const auto first = expert_rows_.begin() + std::int64_t{rank_order_[i]} * homes_;
      sorted_.insert(sorted_.end(), first, first + homes_);
    }
    std::nth_element(sorted_.begin(), sorted_.begin() + room, sorted_.end(), std::greater<>());
    return std::accumulate(sorted_.begin() + room, sorted_.end(), std::int64_t{0});
  }

  [[nodiscard]] bool try_ways(std::int64_t limit) {
    for (Way way : ways) {
      if (way.reuse && present_.empty()) continue;
      for (const bool near : {true, false}) {
        way.near = near;
        if ((!near || num_nodes_ > 1) && try_way(way, limit)) return true;
      }
    }
    return false;
  }

  [[nodiscard]] bool try_way(const Way& way, std::int64_t limit) {
    limit_ = limit;
    home_rows_ = expert_rows_;
    load_ = rank_rows_;
    free_.assign(num_ranks_, spare_);
    sent_.assign(num_ranks_, 0);
    copies_.clear();
    if (way.reuse) reuse_present();
    return settle(way);
  }

  void reuse_present() {
    used_.assign(present_.size(), false);
    for (std::int32_t next = next_reuse(); next >= 0; next = next_reuse()) {
      give(present_[next].expert, present_[next].rank, present_[next].rows);
      used_[next] = true;
    }
  }

  /// Rows that a present copy takes now; 0: none. The last slot of a rank is used only if that
  /// fills the rank. An only slot takes more than home has too much, while home's is free.
  [[nodiscard]] std::int64_t reusable(const Copy& copy) const {
    const std::int32_t home = copy.expert / homes_;
    const std::int64_t room = limit_ - load_[copy.rank], excess = load_[home] - limit_;
    const bool fills = spare_ == 1 && excess > 0 && free_[home] > 0;
    const std::int64_t rows = std::min({home_rows_[copy.expert], room, fills ? room : excess});
    const bool ok = rows > 0 && rows >= min_rows_ && (free_[copy.rank] > 1 || rows == room);
    return ok ? rows : 0;
  }

  /// The present copy that takes rows next, or -1; `rows` of each is what it would take now. First
  /// come those that settle a rank with no other such copy.
  [[nodiscard]] std::int32_t next_reuse() {
    std::ranges::fill(of_home_, 0);
    std::ranges::fill(of_rank_, 0);
    for (std::size_t i = 0; i < present_.size(); ++i) {
      present_[i].rows = used_[i] ? 0 : reusable(present_[i]);
      if (present_[i].rows == 0) continue;
      ++of_home_[present_[i].expert / homes_];
      ++of_rank_[present_[i].rank];
    }
    std::int32_t best = -1;
    std::pair<bool, std::int64_t> most;  // settles, rows
    for (std::size_t i = 0; i < present_.size(); ++i) {
      const Copy& copy = present_[i];
      if (copy.rows == 0) continue;
      const std::int32_t home = copy.expert / homes_;
      const bool settles = (of_rank_[copy.rank] == 1 && copy.rows == limit_ - load_[copy.rank]) ||
                           (of_home_[home] == 1 && copy.rows == load_[home] - limit_);
      if (best >= 0 && std::pair(settles, copy.rows) <= most) continue;
      best = static_cast<std::int32_t>(i);
      most = {settles, copy.rows};
    }
    return best;
  }

  /// Gives rows of ranks above the limit to the emptiest ranks. False: a rank stays above.
  [[nodiscard]] bool settle(const Way& way) {
    for (;;) {
      std::int32_t taker = emptiest();
      std::int64_t room = taker < 0 ? 0 : limit_ - load_[taker];
      const std::int32_t from = giver(way.spread, room);
      if (from < 0) return true;
      if (taker < 0) return false;
      std::int32_t expert = expert_of(from, max_exact);
      const std::int64_t excess = load_[from] - limit_;
      if (way.near && expert >= 0) {
        taker = nearer(taker, expert, std::min({home_rows_[expert], room, excess}));
        room = limit_ - load_[taker];
      }
      if (way.whole && free_[taker] > 1 && excess > room) {
        const std::int32_t fitting = expert_of(from, room);
        if (fitting >= 0) expert = fitting;
      }
      const std::int64_t rows = expert < 0 ? 0 : share(expert, from, taker);
      if (rows == 0) return false;
      give(expert, taker, rows);
    }
  }

  /// The rank below the limit, with a free slot, that has fewest rows; -1: none.
  [[nodiscard]] std::int32_t emptiest() const {
    std::int64_t fewest = limit_;
    std::int32_t taker = -1;
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      const bool better = free_[r] > 0 && load_[r] < fewest;
      fewest = better ? load_[r] : fewest;
      taker = better ? r : taker;
    }
    return taker;
  }

  /// The emptiest rank that may take on the nodes that have the expert, if it has room for seven
  /// eighths of `rows`, which the emptiest rank of all would take; else that one, `taker`.
  [[nodiscard]] std::int32_t nearer(std::int32_t taker, std::int32_t expert, std::int64_t rows) {
    const std::int32_t node_ranks = num_ranks_ / num_nodes_;
    has_expert_.assign(num_nodes_, false);
    has_expert_[expert / homes_ / node_ranks] = true;
    for (const Copy& copy : copies_)
      if (copy.expert == expert) has_expert_[copy.rank / node_ranks] = true;
    std::int64_t fewest = limit_;
    std::int32_t near = -1;
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      if (free_[r] == 0 || load_[r] >= fewest || !has_expert_[r / node_ranks]) continue;
      fewest = load_[r];
      near = r;
    }
    return near >= 0 && limit_ - fewest >= rows - rows / 8 ? near : taker;
  }

  /// The rank above the limit that gives next; -1: none is above.
  [[nodiscard]] std::int32_t giver(bool spread, std::int64_t room) const {
    const std::int64_t weight = spread ? room : 0;
    std::int64_t most = -1;
    std::int32_t giver = -1;
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      const std::int64_t key = load_[r] > limit_ ? sent_[r] * weight + load_[r] : -1;
      giver = key > most ? r : giver;
      most = std::max(most, key);
    }
    return giver;
  }

  /// The expert of most rows, at most `max_rows`, at its home; -1: none has a row.
  [[nodiscard]] std::int32_t expert_of(std::int32_t giver, std::int64_t max_rows) const {
    std::int64_t most = 0;
    std::int32_t expert = -1;
    for (std::int32_t e = giver * homes_; e < (giver + 1) * homes_; ++e) {
      if (home_rows_[e] <= most || home_rows_[e] > max_rows) continue;
      most = home_rows_[e];
      expert = e;
    }
    return expert;
  }

  /// How many of an expert's rows a copy takes; 0: none.
  [[nodiscard]] std::int64_t share(std::int32_t expert, std::int32_t giver,
                                   std::int32_t taker) const {
    const std::int64_t rows = home_rows_[expert];
    const std::int64_t most = std::min(rows, limit_ - load_[taker]);
    const bool fills = free_[taker] == 1 && free_[giver] > 0;
    std::int64_t wanted = fills ? most : std::min(most, load_[giver] - limit_);
    wanted = std::max(wanted, std::min(min_rows_, most));
    if (wanted < min_rows_) return 0;
    if (wanted < rows && alignment_ > 1) {
      const std::int64_t down = wanted / alignment_ * alignment_;
      const bool up = down < wanted && most - down >= alignment_;
      wanted = up ? down + alignment_ : down;
    }
    return wanted >= min_rows_ ? wanted : 0;
  }

  void give(std::int32_t expert, std::int32_t taker, std::int64_t rows) {
    const std::int32_t home = expert / homes_;
    home_rows_[expert] -= rows;
    load_[home] -= rows;
    load_[taker] += rows;
    const std::int64_t first = std::int64_t{taker} * spare_;
    const std::int32_t num_used = spare_ - free_[taker];
    for (std::int32_t s = 0; s < num_used; ++s) {
      Copy& copy = copies_[copy_of_slot_[first + s]];
      if (copy.expert != expert) continue;
      copy.rows += rows;
      return;
    }
    const bool is_present =
        !present_.empty() &&
        std::find(present_slots_.begin() + first, present_slots_.begin() + first + spare_,
                  expert) != present_slots_.begin() + first + spare_;
    copy_of_slot_[first + num_used] = static_cast<std::int32_t>(copies_.size());
    copies_.push_back({rows, expert, taker, is_present});
    --free_[taker];
    if (!is_present) ++sent_[home];
  }

  /// Copies go home while home has room: new ones before present ones, smallest first.
  void send_home() {
    order_.resize(copies_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::ranges::sort(order_, {}, [&](std::int32_t i) {
      const Copy& copy = copies_[i];
      return std::tuple(copy.is_present, copy.rows, copy.expert, copy.rank);
    });
    for (const std::int32_t i : order_) {
      Copy& copy = copies_[i];
      const std::int32_t home = copy.expert / homes_;
      if (load_[home] + copy.rows > limit_) continue;
      load_[home] += copy.rows;
      load_[copy.rank] -= copy.rows;
      home_rows_[copy.expert] += copy.rows;
      copy.rows = 0;
    }
    std::erase_if(copies_, [](const Copy& copy) { return copy.rows == 0; });
  }

  /// A present copy keeps its slot, and stays there unused until a new copy needs the slot. New
  /// copies, by expert, take empty slots first.
  void write_slots(EvenExperts& plan) {
    std::ranges::sort(copies_, {}, [](const Copy& c) { return std::tuple(c.rank, c.expert); });
    auto next = copies_.begin();
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      std::int32_t* const slots = plan.slots.data() + std::int64_t{r} * plan.slots_per_rank;
      std::int64_t* const quotas = plan.quotas.data() + std::int64_t{r} * plan.slots_per_rank;
      for (std::int32_t h = 0; h < homes_; ++h) {
        slots[h] = r * homes_ + h;
        quotas[h] = home_rows_[slots[h]];
      }
      std::span<std::int32_t> spare(slots + homes_, spare_);
      if (present_slots_.empty()) {
        std::ranges::fill(spare, -1);
      } else {
        std::copy_n(present_slots_.begin() + std::int64_t{r} * spare_, spare_, spare.begin());
      }
      const auto first = next;
      for (; next != copies_.end() && next->rank == r; ++next) {
        if (!next->is_present) continue;
        quotas[homes_ + (std::ranges::find(spare, next->expert) - spare.begin())] = next->rows;
      }
      for (auto copy = first; copy != next; ++copy) {
        if (copy->is_present) continue;
        auto place = std::ranges::find(spare, -1);
        if (place == spare.end())  // then one that is present and not used
          place = spare.begin() +
                  (std::find(quotas + homes_, quotas + homes_ + spare_, 0) - (quotas + homes_));
        *place = copy->expert;
        quotas[homes_ + (place - spare.begin())] = copy->rows;
        ++plan.weights_out[copy->expert / homes_];
        ++plan.weights_in[r];
      }
    }
  }

  void write_quotas(std::span<const std::int64_t> rows, EvenExperts& plan) {
    std::ranges::fill(next_row_, 0);
    for (std::int64_t i = 0; i < std::ssize(plan.slots); ++i) {
      const std::int32_t expert = plan.slots[i];
      if (expert < 0 || plan.quotas[i] == 0) continue;
      const std::int64_t rank = i / plan.slots_per_rank;
      plan.local_rows[i] = std::min(plan.quotas[i], rows[rank * num_experts_ + expert]);
      plan.first_row[i] = next_row_[expert];
      next_row_[expert] += plan.quotas[i] - plan.local_rows[i];
    }
  }

  std::int32_t num_ranks_, num_experts_, homes_, spare_, num_nodes_;
  std::int64_t min_rows_, alignment_;
  double limit_factor_;
  std::vector<Copy> present_;                // by rank, then expert
  std::vector<std::int32_t> present_slots_;  // [R, spare]
  std::vector<std::int64_t> expert_rows_, rank_rows_;
  std::int64_t mean_ = 0, total_ = 0;

  // State of the pass that is tried.
  std::int64_t limit_ = 0;
  std::vector<std::int64_t> home_rows_, load_;
  std::vector<std::int32_t> free_, sent_;
  std::vector<Copy> copies_;
  std::vector<std::int32_t> copy_of_slot_;  // [R, spare] places in copies_, in order of use
  std::vector<std::int32_t> of_home_, of_rank_;
  std::vector<bool> used_;
  std::vector<bool> has_expert_;  // by node; the expert is the one that is given

  std::vector<std::int32_t> rank_order_, order_;
  std::vector<std::int64_t> sorted_, next_row_;
};

EvenExpertsPlanner::State::State(std::int32_t num_ranks, std::int32_t num_experts,
                                 const EvenExpertsOptions& options)
    : num_ranks_(num_ranks),
      num_experts_(num_experts),
      homes_(num_ranks > 0 ? num_experts / num_ranks : 0),
      spare_(options.spare_experts),
      num_nodes_(options.num_nodes),
      min_rows_(options.min_rows),
      alignment_(options.alignment),
      limit_factor_(options.limit),
      present_slots_(options.present.begin(), options.present.end()) {
  check(options);
  for (std::size_t i = 0; i < present_slots_.size(); ++i) {
    const std::int32_t expert = present_slots_[i];
    const auto rank = static_cast<std::int32_t>(i / spare_);
    if (expert >= 0) present_.push_back({0, expert, rank, true});
  }
  std::ranges::sort(present_, {}, [](const Copy& c) { return std::tuple(c.rank, c.expert); });
  const auto repeated = std::ranges::adjacent_find(present_, [](const Copy& a, const Copy& b) {
    return a.rank == b.rank && a.expert == b.expert;
  });
  require(repeated == present_.end(), in_even_experts, ": present names expert ",
          repeated == present_.end() ? 0 : repeated->expert, " twice on rank ",
          repeated == present_.end() ? 0 : repeated->rank);
  expert_rows_.resize(num_experts);
  rank_rows_.resize(num_ranks);
  copies_.reserve(std::int64_t{num_ranks} * spare_);
  copy_of_slot_.resize(std::int64_t{num_ranks} * spare_);
  of_home_.resize(num_ranks);
  of_rank_.resize(num_ranks);
  next_row_.resize(num_experts);
  has_expert_.resize(num_nodes_);
}

EvenExpertsPlanner::EvenExpertsPlanner(std::int32_t num_ranks, std::int32_t num_experts,
                                       const EvenExpertsOptions& options)
    : state_(std::make_unique<State>(num_ranks, num_experts, options)) {}
EvenExpertsPlanner::EvenExpertsPlanner(EvenExpertsPlanner&&) noexcept = default;
EvenExpertsPlanner& EvenExpertsPlanner::operator=(EvenExpertsPlanner&&) noexcept = default;
EvenExpertsPlanner::~EvenExpertsPlanner() = default;

void EvenExpertsPlanner::plan(std::span<const std::int64_t> rows, EvenExperts& plan) {
  state_->plan(rows, plan);
}

EvenExperts even_experts(std::span<const std::int64_t> rows, std::int32_t num_ranks,
                         std::int32_t num_experts, const EvenExpertsOptions& options) {
  EvenExperts plan;
  EvenExpertsPlanner(num_ranks, num_experts, options).plan(rows, plan);
  return plan;
}

}  // namespace waybill
