// The kernel of even_experts (src/cuda/planner) with warps that are loops, against the planner.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <numeric>
#include <thread>

#include "cuda/planner/kernel.h"
#include "support/even_experts_cases.h"

namespace waybill {
namespace {

/// A number of each lane.
template <class T>
struct Lanes {
  T values[cuda::warp_lanes];

  Lanes() = default;
  Lanes(T value) {  // NOLINT: a number that all lanes know
    for (T& v : values) v = value;
  }
  template <class U>
  explicit Lanes(const Lanes<U>& other) {
    for (int i = 0; i < cuda::warp_lanes; ++i) values[i] = static_cast<T>(other.values[i]);
  }

  template <class Result, class Each>
  static Lanes<Result> map(const Lanes& a, const Lanes& b, const Each& each) {
    Lanes<Result> result;
    for (int i = 0; i < cuda::warp_lanes; ++i) result.values[i] = each(a.values[i], b.values[i]);
    return result;
  }
  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x + y); });
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x - y); });
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x * y); });
  }
  friend Lanes operator/(const Lanes& a, const Lanes& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x / y); });
  }
  friend Lanes operator&(const Lanes& a, const Lanes& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x & y); });
  }
  friend Lanes operator|(const Lanes& a, const Lanes& b) {
    return map<T>(a, b, [](T x, T y) { return static_cast<T>(x | y); });
  }
  friend Lanes operator>>(const Lanes& a, int bits) {
    return map<T>(a, a, [&](T x, T /*same*/) { return static_cast<T>(x >> bits); });
  }
  friend Lanes operator>>(const Lanes& a, const Lanes& bits) {
    return map<T>(a, bits, [](T x, T y) { return static_cast<T>(x >> y); });
  }
  friend Lanes<bool> operator<(const Lanes& a, const Lanes& b) {
    return map<bool>(a, b, [](T x, T y) { return x < y; });
  }
  friend Lanes<bool> operator>(const Lanes& a, const Lanes& b) { return b < a; }
  friend Lanes<bool> operator<=(const Lanes& a, const Lanes& b) {
    return map<bool>(a, b, [](T x, T y) { return x <= y; });
  }
  friend Lanes<bool> operator>=(const Lanes& a, const Lanes& b) { return b <= a; }
  friend Lanes<bool> operator==(const Lanes& a, const Lanes& b) {
    return map<bool>(a, b, [](T x, T y) { return x == y; });
  }
};
Lanes<bool> operator&&(const Lanes<bool>& a, const Lanes<bool>& b) {
  return Lanes<bool>::map<bool>(a, b, [](bool x, bool y) { return x && y; });
}
Lanes<bool> operator||(const Lanes<bool>& a, const Lanes<bool>& b) {
  return Lanes<bool>::map<bool>(a, b, [](bool x, bool y) { return x || y; });
}

/// What a warp can do, in one thread. What warps share is atomic: each may have a thread.
struct HostWarp {
  using Int = Lanes<int>;
  using Unsigned = Lanes<std::uint32_t>;
  using Wide = Lanes<std::uint64_t>;
  using Mask = Lanes<bool>;

  static Int lane() {
    Int lanes;
    for (int i = 0; i < cuda::warp_lanes; ++i) lanes.values[i] = i;
    return lanes;
  }
  static Int gather(const int* base, const Int& idx, const Mask& mask, int otherwise) {
    Int got;
    for (int i = 0; i < cuda::warp_lanes; ++i)
      got.values[i] = mask.values[i] ? base[idx.values[i]] : otherwise;
    return got;
  }
  static void scatter(int* base, const Int& idx, const Int& value, const Mask& mask) {
    for (int i = 0; i < cuda::warp_lanes; ++i)
      if (mask.values[i]) base[idx.values[i]] = value.values[i];
  }
  static void put(int* at, int value) { *at = value; }
  template <class T>
  static Lanes<T> select(const Mask& mask, const Lanes<T>& yes, const Lanes<T>& no) {
    Lanes<T> result;
    for (int i = 0; i < cuda::warp_lanes; ++i)
      result.values[i] = mask.values[i] ? yes.values[i] : no.values[i];
    return result;
  }
  static void add(int* base, const Int& idx, int value, const Mask& mask) {
    for (int i = 0; i < cuda::warp_lanes; ++i)
      if (mask.values[i]) base[idx.values[i]] += value;
  }
  static void add(int* base, const Int& idx, const Int& value, const Mask& mask) {
    for (int i = 0; i < cuda::warp_lanes; ++i)
      if (mask.values[i]) base[idx.values[i]] += value.values[i];
  }
  template <class T>
  static Lanes<T> larger(const Lanes<T>& a, const Lanes<T>& b) {
    return select(a > b, a, b);
  }
  template <class T>
  static Lanes<T> smaller(const Lanes<T>& a, const Lanes<T>& b) {
    return select(a < b, a, b);
  }
  static void put_four(int* at, const Int& a, const Int& b, const Int& c, const Int& d,
                       const Mask& mask) {
    for (int i = 0; i < cuda::warp_lanes; ++i) {
      if (!mask.values[i]) continue;
      at[0] = a.values[i], at[1] = b.values[i], at[2] = c.values[i], at[3] = d.values[i];
    }
  }
  template <class T>
  static T reduce_min(const Lanes<T>& lanes) {
    return *std::ranges::min_element(lanes.values);
  }
  template <class T>
  static T reduce_max(const Lanes<T>& lanes) {
    return *std::ranges::max_element(lanes.values);
  }
  static int reduce_add(const Int& lanes) {
    int sum = 0;
    for (const int value : lanes.values) sum += value;
    return sum;
  }
  static std::uint32_t ballot(const Mask& mask) {
    std::uint32_t lanes = 0;
    for (unsigned i = 0; i < cuda::warp_lanes; ++i) lanes |= mask.values[i] ? 1U << i : 0U;
    return lanes;
  }
  static int lowest(std::uint32_t lanes) { return std::countr_zero(lanes); }
  static int count(std::uint32_t lanes) { return std::popcount(lanes); }
  static Int count_below(std::uint32_t lanes) {
    Int below;
    for (int i = 0; i < cuda::warp_lanes; ++i)
      below.values[i] = std::popcount(lanes & ((1U << static_cast<unsigned>(i)) - 1U));
    return below;
  }
  template <class T>
  static T broadcast(const Lanes<T>& lanes, int lane) {
    return lanes.values[lane];
  }
  template <class T>
  static Lanes<T> exchange(const Lanes<T>& lanes, int step) {
    Lanes<T> other;
    for (int i = 0; i < cuda::warp_lanes; ++i) other.values[i] = lanes.values[i ^ step];
    return other;
  }
  static Int scan(const Int& lanes) {
    Int sums;
    std::partial_sum(std::begin(lanes.values), std::end(lanes.values), sums.values);
    return sums;
  }
  static int bit_width(unsigned value) { return std::bit_width(value); }
  static void sync() {}

  template <class T>
  static T* pin(T* shared) {
    return shared;
  }
  static int keep(int value) { return value; }
  static Int hold(const Int& value) { return value; }
  static int read(const int* at) { return *at; }
  static int look(const int* at) { return std::atomic_ref(*const_cast<int*>(at)).load(); }
  struct Four {
    int x, y, z, w;
  };
  static Four read_four(const int* at) { return {at[0], at[1], at[2], at[3]}; }
  template <std::size_t Width>
  static void load(const std::int32_t* at, std::int32_t (&to)[Width]) {
    std::copy_n(at, Width, to);
  }
  template <std::size_t Width>
  static void store(int* at, const unsigned (&from)[Width]) {
    std::copy_n(from, Width, at);
  }
  static int take_next(int* number) { return std::atomic_ref(*number).fetch_add(1); }
  static void block_max(int* at, int value) { *at = std::max(*at, value); }
  static void block_min(int* at, int value) {
    std::atomic_ref shared(*at);
    int now = shared.load();
    while (value < now && !shared.compare_exchange_weak(now, value)) {
    }
  }
  static int block_add(int* at, int value) { return std::exchange(*at, *at + value); }
  static int block_exchange(int* at, int value) { return std::exchange(*at, value); }
};

/// A block of `warps` warps, of which `pass_warps` try limits; a plan as the kernel writes it.
class HostBlock {
 public:
  /// @param bound_first the bound is known before tries begin, else it is sought meanwhile
  HostBlock(const test::EvenExpertsCase& one, int warps, int pass_warps, bool bound_first = false)
      : rows_(one.rows.begin(), one.rows.end()), warps_(warps), bound_first_(bound_first) {
    p_.num_ranks = one.num_ranks;
    p_.num_experts = one.num_experts;
    p_.homes = one.num_experts / one.num_ranks;
    p_.spare = one.options.spare_experts;
    p_.min_rows = static_cast<std::int32_t>(std::min<std::int64_t>(one.options.min_rows, INT_MAX));
    p_.alignment =
        static_cast<std::int32_t>(std::min<std::int64_t>(one.options.alignment, INT_MAX));
    p_.limit_factor = one.options.limit;
    p_.num_nodes = one.options.num_nodes;
    p_.pass_warps = pass_warps;
    p_.rows = rows_.data();
    if (!one.present.empty()) p_.present = one.present.data();
    p_.present_stride = p_.spare;
    const std::int64_t slots = std::int64_t{p_.num_ranks} * (p_.homes + p_.spare);
    for (auto* table : {&slots_, &quotas_, &local_, &first_}) table->assign(slots, -7);
    out_.assign(p_.num_ranks, -7);
    in_.assign(p_.num_ranks, -7);
    figures_.assign(cuda::num_even_figures, -7);
    p_.slots = slots_.data();
    p_.quotas = quotas_.data();
    p_.local_rows = local_.data();
    p_.first_row = first_.data();
    p_.weights_out = out_.data();
    p_.weights_in = in_.data();
    p_.figures = figures_.data();
  }

  int run() { return p_.num_nodes > 1 ? run_with<true>() : run_with<false>(); }

  void expect_equal(const EvenExperts& plan) const {
    const auto same = [](const auto& got, const auto& expected) {
      return std::ranges::equal(got, expected);
    };
    EXPECT_TRUE(same(slots_, plan.slots));
    EXPECT_TRUE(same(quotas_, plan.quotas));
    EXPECT_TRUE(same(local_, plan.local_rows));
    EXPECT_TRUE(same(first_, plan.first_row));
    EXPECT_TRUE(same(out_, plan.weights_out));
    EXPECT_TRUE(same(in_, plan.weights_in));
    EXPECT_EQ(figures_[cuda::figure_max_rows], plan.max_rows);
    EXPECT_EQ(figures_[cuda::figure_bound], plan.bound);
    EXPECT_EQ(static_cast<double>(figures_[cuda::figure_total]) / plan.num_ranks, plan.mean_rows);
  }

  [[nodiscard]] int attempt() const { return figures_[cuda::figure_try]; }
  /// Whether the bound is above the mean.
  [[nodiscard]] bool was_vain() const { return was_vain_; }

 private:
  template <bool Nodes>
  int run_with() {
    if (p_.num_ranks <= 32) return run_as<1, Nodes>();
    return p_.num_ranks <= 64 ? run_as<2, Nodes>() : run_as<4, Nodes>();
  }

  template <int Own, bool Nodes>
  int run_as() {
    using Phases = cuda::EvenExpertsPhases<HostWarp, Own, Nodes>;
    const int threads = warps_ * cuda::warp_lanes;
    // What is not written must not be read: numbers that no plan has.
    std::vector<int> words(cuda::EvenExpertsMemory::words(p_, threads), -1000000007);
    const cuda::EvenExpertsMemory m(words.data(), p_);
    std::vector<Phases> block;
    for (int t = 0; t < threads; ++t) block.emplace_back(p_, m, t, threads);
    const auto all = [&](auto phase) {
      for (Phases& thread : block) (thread.*phase)();
    };
    all(&Phases::clear);
    all(&Phases::sum_some_ranks);
    all(&Phases::note_status);
    for (int w = 0; w < warps_; ++w) warp(block, w).sum_ranks(w, warps_);
    const int others = warps_ - p_.pass_warps;  // they seek the bound
    EXPECT_GT(others, 0);
    for (int w = 0; w < p_.pass_warps; ++w) (void)warp(block, w).note_sums();
    for (int w = 0; w < others; ++w) warp(block, p_.pass_warps + w).order_ranks(w, others);
    if (m.block->status != 0) {
      all(&Phases::write_failure);
      return figures_[cuda::figure_status];
    }
    if (bound_first_) {
      find_bound(block);
      try_limits(block);
    } else {
      std::jthread other([&] { find_bound(block); });
      try_limits(block);
    }
    was_vain_ = block[0].was_vain();
    if (was_vain_) {
      all(&Phases::take_bound);
      try_limits(block);
    }
    all(&Phases::fill_slots);
    for (int w = 0; w < warps_; ++w) warp(block, w).write_homes(w, warps_);
    for (int w = 0; w < warps_; ++w) warp(block, w).write_copies(w, warps_);
    return figures_[cuda::figure_status];
  }

  template <class Phases>
  static Phases& warp(std::vector<Phases>& block, int number) {
    return block[number * cuda::warp_lanes];
  }

  /// By the warps that do not try limits.
  template <class Phases>
  void find_bound(std::vector<Phases>& block) const {
    const int others = warps_ - p_.pass_warps, first = p_.pass_warps * cuda::warp_lanes;
    int sums = 0;
    for (int w = p_.pass_warps; w < warps_; ++w) sums += warp(block, w).choose_sums() ? 1 : 0;
    EXPECT_TRUE(sums == 0 || sums == others);
    if (sums == 0) return;
    const int threads = others * cuda::warp_lanes;
    for (int t = 0; t < threads; ++t) block[first + t].sort_experts(t, threads);
    for (int w = 0; w < others; ++w) warp(block, p_.pass_warps + w).find_bound(w, others);
  }

  template <class Phases>
  void try_limits(std::vector<Phases>& block) const {
    std::vector<std::jthread> passes;
    for (int w = 1; w < p_.pass_warps; ++w)
      passes.emplace_back([&, w] { warp(block, w).try_limits(w); });
    block[0].try_limits(0);
  }

  std::vector<std::int32_t> rows_;
  int warps_;
  bool bound_first_, was_vain_ = false;
  cuda::EvenExpertsParams p_;
  std::vector<std::int32_t> slots_, quotas_, local_, first_, out_, in_, figures_;
};

TEST(EvenExpertsBlock, PlansAsThePlanner) {
  std::vector<int> tries(cuda::even_rungs * cuda::even_ways);
  // When the kernel changes, let all of them run: a step of 1.
  for (const test::EvenExpertsCase& one : test::some_even_experts_cases(9, 22)) {
    SCOPED_TRACE(one.name);
    HostBlock block(one, one.num_experts % 3 == 0 ? 5 : 4, 1);
    ASSERT_EQ(block.run(), 0);
    block.expect_equal(even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
    if (HasFailure()) return;
    ++tries[block.attempt()];
  }
  // Each way was the plan of some case, and so was a rung above the lowest.
  for (int way = 0; way < cuda::even_ways; ++way) {
    int wins = 0;
    for (int rung = 0; rung < cuda::even_rungs; ++rung) wins += tries[rung * cuda::even_ways + way];
    EXPECT_GT(wins, 0) << "way " << way;
  }
  EXPECT_GT(std::accumulate(tries.begin() + cuda::even_ways, tries.end(), 0), 0);
}

/// The nodes that ranks of a case may be of: the ranks are a multiple of them.
std::int32_t nodes_of(const test::EvenExpertsCase& one, std::size_t draw) {
  std::int32_t nodes = std::array{2, 3, 4, 8, 32}[draw % 5];
  while (one.num_ranks % nodes != 0) --nodes;
  return nodes;
}

TEST(EvenExpertsBlock, PlansAsThePlannerOnNodes) {
  std::vector<int> tries(cuda::even_rungs * 2 * cuda::even_ways);
  std::size_t number = 0;
  for (test::EvenExpertsCase& one : test::some_even_experts_cases(3, 31)) {
    SCOPED_TRACE(one.name);
    one.options.num_nodes = nodes_of(one, number++);
    HostBlock block(one, 4, 1);
    ASSERT_EQ(block.run(), 0);
    block.expect_equal(even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
    if (HasFailure()) return;
    if (one.options.num_nodes > 1) ++tries[block.attempt() % (2 * cuda::even_ways)];
  }
  EXPECT_GT(tries[0], 0) << "present copies, near";
  EXPECT_GT(tries[2], 0) << "spread, near";
}

TEST(EvenExpertsBlock, TheLowestTryWinsWhicheverEndsFirst) {
  for (const test::EvenExpertsCase& one : test::some_even_experts_cases(4, 41)) {
    SCOPED_TRACE(one.name);
    HostBlock block(one, 5, 4);
    ASSERT_EQ(block.run(), 0);
    block.expect_equal(even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
    if (HasFailure()) return;
  }
}

TEST(EvenExpertsBlock, TriesBeginAgainWhereTheBoundIsAboveTheMean) {
  int vain = 0, good = 0;
  for (test::EvenExpertsCase& one : test::some_even_experts_cases(5, 51)) {
    for (const bool bound_first : {false, true}) {
      SCOPED_TRACE(concat(one.name, bound_first ? ", bound first" : ""));
      HostBlock block(one, 5, 2, bound_first);
      ASSERT_EQ(block.run(), 0);
      block.expect_equal(
          even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
      if (HasFailure()) return;
      ++(block.was_vain() ? vain : good);
    }
  }
  EXPECT_GT(vain, 0);
  EXPECT_GT(good, 0);
}

TEST(EvenExpertsBlock, GiversOfManyRowsNeedWideKeys) {
  std::vector<std::int64_t> rows(8 * 32, 1000);
  for (std::int32_t e = 0; e < 4; ++e) rows[e] = 200'000'000 + e;
  for (std::int32_t e = 4; e < 8; ++e) rows[e] = 150'000'000 + e;
  const test::EvenExpertsCase one{"", 8, 32, rows, {}, {.spare_experts = 3}};
  HostBlock block(one, 8, 1);
  ASSERT_EQ(block.run(), 0);
  block.expect_equal(even_experts(rows, 8, 32, one.options));
}

TEST(EvenExpertsBlock, RanksOfManyHomesNeedWideKeys) {
  for (const std::int32_t homes : {128, 129}) {
    std::vector<std::int64_t> rows(std::int64_t{4} * homes, 3);
    for (std::int32_t e = 0; e < homes; ++e) rows[e] = 5 + e % 7 + (e == homes - 1 ? 90 : 0);
    const test::EvenExpertsCase one{"", 1, 4 * homes, rows, {}, {.spare_experts = 2}};
    const test::EvenExpertsCase ranks{"",
                                      4,
                                      homes * 4,
                                      [&] {
                                        std::vector<std::int64_t> all;
                                        for (int r = 0; r < 4; ++r)
                                          all.insert(all.end(), rows.begin(), rows.end());
                                        return all;
                                      }(),
                                      {},
                                      {.spare_experts = 2}};
    for (const auto& sample : {one, ranks}) {
      HostBlock block(sample, 8, 1);
      ASSERT_EQ(block.run(), 0);
      block.expect_equal(
          even_experts(sample.rows, sample.num_ranks, sample.num_experts, sample.options));
    }
  }
}

TEST(EvenExpertsBlock, OptionsBeyondAnyRow) {
  test::EvenExpertsCase one = test::even_experts_cases(1).back();
  for (const std::int64_t large : {std::int64_t{INT_MAX}, std::int64_t{1} << 40}) {
    one.options.min_rows = large;
    HostBlock least(one, 8, 1);
    ASSERT_EQ(least.run(), 0);
    least.expect_equal(even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
    one.options.min_rows = 0;
    one.options.alignment = large;
    HostBlock aligned(one, 8, 1);
    ASSERT_EQ(aligned.run(), 0);
    aligned.expect_equal(
        even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
    one.options.alignment = 1;
  }
  one.options.limit = 1e8;
  HostBlock loose(one, 8, 1);
  ASSERT_EQ(loose.run(), 0);
  loose.expect_equal(even_experts(one.rows, one.num_ranks, one.num_experts, one.with_present()));
}

TEST(EvenExpertsBlock, SaysWhatIsWrong) {
  const auto status = [](std::vector<std::int64_t> rows, std::vector<std::int32_t> present = {}) {
    return static_cast<cuda::EvenExpertsStatus>(
        HostBlock({"", 2, 4, std::move(rows), std::move(present), {.spare_experts = 2}}, 2, 1)
            .run());
  };
  using enum cuda::EvenExpertsStatus;
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, 8}), good);
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, -1}), negative_rows);
  EXPECT_EQ(status({INT_MAX, 0, 0, 0, 0, 0, 0, 0}), too_many_rows);
  EXPECT_EQ(status({INT_MAX - 1, 0, 0, 0, 0, 0, 0, 0}), good);
  EXPECT_EQ(status({INT_MAX - 1, 0, 0, 0, 0, 0, 1, 0}), too_many_rows);
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, 8}, {2, 3, 0, -1}), good);
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, 8}, {2, 1, -1, -1}), wrong_present);
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, 8}, {2, 2, -1, -1}), wrong_present);
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, 8}, {4, -1, -1, -1}), wrong_present);
  EXPECT_EQ(status({1, 2, 3, 4, 5, 6, 7, 8}, {-2, -1, -1, -1}), wrong_present);
}

}  // namespace
}  // namespace waybill
