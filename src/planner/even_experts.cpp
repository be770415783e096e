#include <algorithm>
#include <bit>
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

/// The least of some numbers and its place, the first of equal ones. A change costs a step per
/// level of a binary tree.
class MinTree {
 public:
  static constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();

  void resize(std::int32_t size) {
    first_leaf_ = static_cast<std::int32_t>(std::bit_ceil(static_cast<std::uint32_t>(size)));
    tree_.assign(std::int64_t{2} * first_leaf_, none);
  }

  template <typename Number>
  void fill(std::int32_t size, const Number& number) {
    for (std::int32_t i = 0; i < size; ++i) tree_[first_leaf_ + i] = number(i);
    for (std::int32_t i = first_leaf_ - 1; i > 0; --i)
      tree_[i] = std::min(tree_[2 * i], tree_[2 * i + 1]);
  }

  void set(std::int32_t place, std::int64_t number) {
    std::int32_t i = first_leaf_ + place;
    tree_[i] = number;
    for (i /= 2; i > 0; i /= 2) {
      const std::int64_t least = std::min(tree_[2 * i], tree_[2 * i + 1]);
      if (tree_[i] == least) return;
      tree_[i] = least;
    }
  }

  /// -1: all are `none`.
  [[nodiscard]] std::int32_t place() const {
    if (tree_[1] == none) return -1;
    std::int32_t i = 1;
    while (i < first_leaf_) i = 2 * i + (tree_[2 * i] != tree_[1] ? 1 : 0);
    return i - first_leaf_;
  }

 private:
  std::int32_t first_leaf_ = 1;
  std::vector<std::int64_t> tree_;  // each the lesser of its two; numbers from first_leaf_
};

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
    std::int32_t expert, home, rank;
    bool is_present;
    std::int32_t next = -1;  // place in copies_ of another copy of the expert, or -1
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
            ", expected >= 1 and < 1e+09");
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
    std::uint64_t any = 0;  // its high bits tell of a number that is negative or too large
    std::int32_t rank = 0;
    for (; rank + 4 <= num_ranks_; rank += 4) any |= add_rows<4>(rows.data() + row_of(rank));
    for (; rank < num_ranks_; ++rank) any |= add_rows<1>(rows.data() + row_of(rank));
    if (any > std::uint64_t{max_exact}) {
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

  [[nodiscard]] std::int64_t row_of(std::int32_t rank) const {
    return std::int64_t{rank} * num_experts_;
  }

  /// Adds rows of so many ranks to expert_rows_. @return the bits that any of the numbers has
  template <int num>
  [[nodiscard]] std::uint64_t add_rows(const std::int64_t* rows) {
    std::uint64_t any = 0;
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      // Wraps only where a number is too large, which is an error.
      auto sum = static_cast<std::uint64_t>(expert_rows_[e]);
      for (int i = 0; i < num; ++i) {
        const auto n = static_cast<std::uint64_t>(rows[std::int64_t{i} * num_experts_ + e]);
        sum += n;
        any |= n;
      }
      expert_rows_[e] = static_cast<std::int64_t>(sum);
    }
    return any;
  }

  [[nodiscard]] std::int64_t lower_bound() {
    for (std::int32_t r = 0; r < num_ranks_; ++r) fullest_first_[r] = {-rank_rows_[r], r};
    std::ranges::sort(fullest_first_);
    largest_.clear();
    num_looked_at_ = 0;
    std::int64_t bound = mean_, held = 0;
    for (std::int32_t k = 1; k < num_ranks_; ++k) {
      held -= fullest_first_[k - 1].first;
      const std::int64_t room = std::int64_t{spare_} * (num_ranks_ - k);
      const std::int64_t experts = std::int64_t{k} * homes_;
      if (room >= experts) continue;
      // The largest experts are at least average: most k need no sorting.
      const double kept = static_cast<double>(held) * static_cast<double>(experts - room) /
                          static_cast<double>(experts);
      if (kept < static_cast<double>(bound) * k * (1 - 1e-9)) continue;
      bound = std::max(bound, (kept_by_fullest(k, held, room) + k - 1) / k);
    }
    return bound;
  }

  /// The rows that the k fullest ranks keep of the `held` that they have, if the others take their
  /// `room` largest experts. k grows from call to call and room shrinks, so an expert that is not
  /// among the largest is never looked at again.
  [[nodiscard]] std::int64_t kept_by_fullest(std::int32_t k, std::int64_t held, std::int64_t room) {
    for (; num_looked_at_ < k; ++num_looked_at_) {
      const std::int32_t rank = fullest_first_[num_looked_at_].second;
      const auto first = expert_rows_.begin() + std::int64_t{rank} * homes_;
      largest_.insert(largest_.end(), first, first + homes_);
    }
    std::ranges::nth_element(largest_, largest_.begin() + room, std::greater<>());
    largest_.resize(room);
    return held - std::accumulate(largest_.begin(), largest_.end(), std::int64_t{0});
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
    last_copy_.assign(num_experts_, -1);
    if (way.reuse) reuse_present();
    return settle(way);
  }

  void reuse_present() {
    used_.assign(present_.size(), false);
    std::ranges::fill(of_home_, 0);
    std::ranges::fill(of_rank_, 0);
    for (Copy& copy : present_) copy.rows = 0;
    for (std::int32_t i = 0; i < std::ssize(present_); ++i) look_at(i);
    for (std::int32_t next = next_reuse(); next >= 0; next = next_reuse()) {
      const auto [rows, expert, home, rank, is_present, other] = present_[next];
      give(expert, rank, rows);
      used_[next] = true;
      for (const std::int32_t r : {rank, home})
        for (std::int32_t i = on_rank_[r]; i < on_rank_[r + 1]; ++i) look_at(i);
      for (std::int32_t i = first_of_home_[home]; i >= 0; i = present_[i].next) look_at(i);
    }
  }

  /// Brings up to date what a present copy would take now, and how many others there are like it.
  void look_at(std::int32_t place) {
    Copy& copy = present_[place];
    const std::int64_t rows = used_[place] ? 0 : reusable(copy);
    const std::int32_t more = (rows > 0 ? 1 : 0) - (copy.rows > 0 ? 1 : 0);
    of_home_[copy.home] += more;
    of_rank_[copy.rank] += more;
    copy.rows = rows;
  }

  /// Rows that a present copy takes now; 0: none. The last slot of a rank is used only if that
  /// fills the rank. An only slot takes more than home has too much, while home's is free.
  [[nodiscard]] std::int64_t reusable(const Copy& copy) const {
    const std::int64_t room = limit_ - load_[copy.rank], excess = load_[copy.home] - limit_;
    const bool fills = spare_ == 1 && excess > 0 && free_[copy.home] > 0;
    const std::int64_t rows = std::min({home_rows_[copy.expert], room, fills ? room : excess});
    const bool ok = rows > 0 && rows >= min_rows_ && (free_[copy.rank] > 1 || rows == room);
    return ok ? rows : 0;
  }

  /// The present copy that takes rows next, or -1. First come those that settle a rank with no
  /// other such copy.
  [[nodiscard]] std::int32_t next_reuse() const {
    std::int32_t best = -1;
    std::pair<bool, std::int64_t> most;  // settles, rows
    for (std::size_t i = 0; i < present_.size(); ++i) {
      const Copy& copy = present_[i];
      if (copy.rows == 0) continue;
      const bool settles = (of_rank_[copy.rank] == 1 && copy.rows == limit_ - load_[copy.rank]) ||
                           (of_home_[copy.home] == 1 && copy.rows == load_[copy.home] - limit_);
      if (best >= 0 && std::pair(settles, copy.rows) <= most) continue;
      best = static_cast<std::int32_t>(i);
      most = {settles, copy.rows};
    }
    return best;
  }

  /// Gives rows of ranks above the limit to the emptiest ranks. False: a rank stays above.
  [[nodiscard]] bool settle(const Way& way) {
    above_.clear();
    for (std::int32_t r = 0; r < num_ranks_; ++r)
      if (load_[r] > limit_) above_.push_back(r);
    takers_.fill(num_ranks_, [&](std::int32_t r) { return taking(r); });
    while (!above_.empty()) {
      std::int32_t taker = takers_.place();
      if (taker < 0) return false;
      std::int64_t room = limit_ - load_[taker];
      const auto giver = next_giver(way.spread, room);
      const std::int32_t from = *giver;
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
      takers_.set(taker, taking(taker));
      if (load_[from] > limit_) continue;
      above_.erase(giver);
      takers_.set(from, taking(from));
    }
    return true;
  }

  /// A rank's rows, if it may take more: it is below the limit and has a free slot.
  [[nodiscard]] std::int64_t taking(std::int32_t rank) const {
    return free_[rank] > 0 && load_[rank] < limit_ ? load_[rank] : MinTree::none;
  }

  /// The emptiest rank that may take on the nodes that have the expert, if it has room for seven
  /// eighths of `rows`, which the emptiest rank of all would take; else that one, `taker`.
  [[nodiscard]] std::int32_t nearer(std::int32_t taker, std::int32_t expert,
                                    std::int64_t rows) const {
    const std::int32_t node_ranks = num_ranks_ / num_nodes_;
    std::pair best(limit_, num_ranks_);  // rows, rank
    const auto look_on_node_of = [&](std::int32_t rank) {
      const std::int32_t first = rank / node_ranks * node_ranks;
      for (std::int32_t r = first; r < first + node_ranks; ++r)
        best = std::min(best, std::pair(taking(r), r));
    };
    look_on_node_of(expert / homes_);
    for (std::int32_t i = last_copy_[expert]; i >= 0; i = copies_[i].next)
      look_on_node_of(copies_[i].rank);
    return limit_ - best.first >= std::max<std::int64_t>(rows - rows / 8, 1) ? best.second : taker;
  }

  /// The rank above the limit that gives next: its place in `above_`, which is not empty.
  [[nodiscard]] std::vector<std::int32_t>::iterator next_giver(bool spread, std::int64_t room) {
    const std::int64_t weight = spread ? room : 0;
    std::int64_t most = -1;
    auto giver = above_.begin();
    for (auto at = above_.begin(); at != above_.end(); ++at) {
      const std::int64_t key = sent_[*at] * weight + load_[*at];
      giver = key > most ? at : giver;
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
    const auto place = static_cast<std::int32_t>(copies_.size());
    copy_of_slot_[first + num_used] = place;
    copies_.push_back({rows, expert, home, taker, is_present, last_copy_[expert]});
    last_copy_[expert] = place;
    --free_[taker];
    if (!is_present) ++sent_[home];
  }

  /// Copies go home while home has room: new ones before present ones, smallest first.
  void send_home() {
    const auto fits = [&](const Copy& copy) { return load_[copy.home] + copy.rows <= limit_; };
    if (std::ranges::none_of(copies_, fits)) return;  // nor would one later
    order_.resize(copies_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::ranges::sort(order_, {}, [&](std::int32_t i) {
      const Copy& copy = copies_[i];
      return std::tuple(copy.is_present, copy.rows, copy.expert, copy.rank);
    });
    for (const std::int32_t i : order_) {
      Copy& copy = copies_[i];
      if (!fits(copy)) continue;
      load_[copy.home] += copy.rows;
      load_[copy.rank] -= copy.rows;
      home_rows_[copy.expert] += copy.rows;
      copy.rows = 0;
    }
  }

  /// A present copy keeps its slot, and stays there unused until a new copy needs the slot. New
  /// copies, by expert, take empty slots first.
  void write_slots(EvenExperts& plan) {
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      std::int32_t* const slots = plan.slots.data() + std::int64_t{r} * plan.slots_per_rank;
      std::int64_t* const quotas = plan.quotas.data() + std::int64_t{r} * plan.slots_per_rank;
      for (std::int32_t h = 0; h < homes_; ++h) {
        slots[h] = r * homes_ + h;
        quotas[h] = home_rows_[slots[h]];
      }
      const std::int64_t first = std::int64_t{r} * spare_;
      std::span<std::int32_t> spare(slots + homes_, spare_);
      if (present_slots_.empty()) {
        std::ranges::fill(spare, -1);
      } else {
        std::copy_n(present_slots_.begin() + first, spare_, spare.begin());
      }
      const std::span made(copy_of_slot_.data() + first, spare_ - free_[r]);
      std::ranges::sort(made, {}, [&](std::int32_t i) { return copies_[i].expert; });
      for (const std::int32_t i : made) {
        if (!copies_[i].is_present) continue;
        const auto place = std::ranges::find(spare, copies_[i].expert) - spare.begin();
        quotas[homes_ + place] = copies_[i].rows;
      }
      for (const std::int32_t i : made)
        if (!copies_[i].is_present && copies_[i].rows > 0) write_new(copies_[i], spare, plan);
    }
  }

  /// Writes a new copy into one of its rank's spare slots.
  void write_new(const Copy& copy, std::span<std::int32_t> spare, EvenExperts& plan) {
    std::int64_t* const quotas =
        plan.quotas.data() + std::int64_t{copy.rank} * plan.slots_per_rank + homes_;
    auto place = std::ranges::find(spare, -1) - spare.begin();
    if (place == spare_)  // then one that is present and not used
      place = std::find(quotas, quotas + spare_, 0) - quotas;
    spare[place] = copy.expert;
    quotas[place] = copy.rows;
    ++plan.weights_out[copy.home];
    ++plan.weights_in[copy.rank];
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
  std::vector<Copy> present_;                // by rank, then expert; next: of the same home
  std::vector<std::int32_t> on_rank_;        // [R + 1] the first in present_ of each rank
  std::vector<std::int32_t> first_of_home_;  // [R] the first in present_ of a home's experts, or -1
  std::vector<std::int32_t> present_slots_;  // [R, spare]
  std::vector<std::int64_t> expert_rows_, rank_rows_;
  std::int64_t mean_ = 0, total_ = 0;

  // State of the pass that is tried.
  std::int64_t limit_ = 0;
  std::vector<std::int64_t> home_rows_, load_;
  std::vector<std::int32_t> free_, sent_;
  std::vector<Copy> copies_;
  std::vector<std::int32_t> copy_of_slot_;  // [R, spare] places in copies_, in order of use
  std::vector<std::int32_t> last_copy_;     // [E] place in copies_ of the newest, or -1
  std::vector<std::int32_t> above_;         // ranks above the limit, in order
  MinTree takers_;                          // rows of the ranks that may take
  std::vector<std::int32_t> of_home_, of_rank_;
  std::vector<bool> used_;

  std::vector<std::pair<std::int64_t, std::int32_t>> fullest_first_;  // -rows, rank
  std::vector<std::int32_t> order_;
  std::int32_t num_looked_at_ = 0;     // ranks whose experts are in largest_, or were
  std::vector<std::int64_t> largest_;  // experts of the fullest ranks
  std::vector<std::int64_t> next_row_;
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
    if (expert >= 0) present_.push_back({0, expert, expert / homes_, rank, true});
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
  on_rank_.assign(num_ranks + 1, 0);
  first_of_home_.assign(num_ranks, -1);
  for (auto i = static_cast<std::int32_t>(std::ssize(present_)) - 1; i >= 0; --i) {
    present_[i].next = std::exchange(first_of_home_[present_[i].home], i);
    ++on_rank_[present_[i].rank + 1];
  }
  std::partial_sum(on_rank_.begin(), on_rank_.end(), on_rank_.begin());
  fullest_first_.resize(num_ranks);
  takers_.resize(num_ranks);
  above_.reserve(num_ranks);
  copies_.reserve(std::int64_t{num_ranks} * spare_);
  copy_of_slot_.resize(std::int64_t{num_ranks} * spare_);
  of_home_.resize(num_ranks);
  of_rank_.resize(num_ranks);
  next_row_.resize(num_experts);
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
