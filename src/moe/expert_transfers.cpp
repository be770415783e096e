#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "core/number.h"
#include "moe/gradient_sum.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"

namespace waybill {

void ExpertSlotTable::check(const char* who) const {
  require(num_ranks >= 1 && num_experts >= 1 && num_experts % num_ranks == 0, who,
          ": num_experts = ", num_experts, ", expected a multiple of ", num_ranks, " ranks");
  const std::int64_t count = std::ssize(experts);
  require(count % num_ranks == 0 && count >= num_experts, who, ": slots are ", count,
          ", expected as many for each of ", num_ranks, " ranks, and at least ", num_experts);
  const std::int32_t per_rank = slots_per_rank();
  const std::int32_t home = experts_per_rank();
  for (std::int32_t r = 0; r < num_ranks; ++r) {
    const auto of_rank = experts.subspan(std::int64_t{r} * per_rank, per_rank);
    for (std::int32_t s = 0; s < per_rank; ++s) {
      const std::int32_t expert = of_rank[s];
      if (s < home) {
        require(expert == r * home + s, who, ": slots[", r, "][", s, "] = ", expert, ", expected ",
                r * home + s, ", the home expert");
        continue;
      }
      require(-1 <= expert && expert < num_experts, who, ": slots[", r, "][", s, "] = ", expert,
              ", expected -1 or 0..", num_experts - 1);
      const auto before = of_rank.first(s);
      require(expert < 0 || std::ranges::find(before, expert) == before.end(), who, ": slots[", r,
              "][", s, "] = ", expert, ", expected an expert that rank ", r, " has not yet");
    }
  }
}

namespace {

/// A place where an expert lies.
struct Holder {
  std::int32_t rank = 0;
  std::int32_t slot = 0;
};

/// The copies of each expert, [num_experts], by rank.
std::vector<std::vector<Holder>> copies_of(const ExpertSlotTable& slots) {
  std::vector<std::vector<Holder>> copies(slots.num_experts);
  const std::int32_t per_rank = slots.slots_per_rank();
  for (std::int32_t r = 0; r < slots.num_ranks; ++r) {
    for (std::int32_t s = slots.experts_per_rank(); s < per_rank; ++s) {
      const std::int32_t expert = slots.experts[std::int64_t{r} * per_rank + s];
      if (expert >= 0) copies[expert].push_back({r, s});
    }
  }
  return copies;
}

Holder home_of(const ExpertSlotTable& slots, std::int32_t expert) {
  const std::int32_t rank = slots.home_of(expert);
  return {rank, expert - rank * slots.experts_per_rank()};
}

/// The holder of a binomial tree that sends to holder i > 0: i without its highest bit, in the
/// round of that bit.
constexpr std::uint32_t parent_of(std::uint32_t i) { return i - std::bit_floor(i); }
constexpr int round_of(std::uint32_t i) { return std::bit_width(i) - 1; }

/// A transfer and when it may begin: rounds among nodes come before those in a node.
struct TimedTransfer {
  int round = 0;
  ExpertTransfer transfer;
};

/// @param holders the first has the expert
void add_tree(std::int32_t expert, const std::vector<Holder>& holders, int first_round,
              std::vector<TimedTransfer>& transfers) {
  for (std::uint32_t i = 1; i < holders.size(); ++i) {
    const Holder& from = holders[parent_of(i)];
    const Holder& to = holders[i];
    transfers.push_back(
        {first_round + round_of(i), {expert, from.rank, from.slot, to.rank, to.slot}});
  }
}

}  // namespace

std::vector<ExpertTransfer> plan_weight_transfers(const ExpertSlotTable& slots,
                                                  std::int32_t ranks_per_node) {
  constexpr const char* who = "plan_weight_transfers";
  slots.check(who);
  require(ranks_per_node >= 1 && slots.num_ranks % ranks_per_node == 0, who,
          ": ranks_per_node = ", ranks_per_node, ", expected a divisor of ", slots.num_ranks);
  const auto copies = copies_of(slots);
  const auto num_nodes = static_cast<std::uint32_t>(slots.num_ranks / ranks_per_node);
  std::vector<TimedTransfer> timed;
  for (std::int32_t expert = 0; expert < slots.num_experts; ++expert) {
    const Holder home = home_of(slots, expert);
    std::vector<Holder> firsts{home};  // one for each node that holds it, home's node first
    std::vector<std::vector<Holder>> in_nodes;  // those of each such node
    in_nodes.push_back({home});
    for (const Holder& copy : copies[expert]) {
      const std::int32_t node = copy.rank / ranks_per_node;
      if (node == home.rank / ranks_per_node) {
        in_nodes.front().push_back(copy);
      } else if (node != firsts.back().rank / ranks_per_node) {
        firsts.push_back(copy);
        in_nodes.push_back({copy});
      } else {
        in_nodes.back().push_back(copy);
      }
    }
    add_tree(expert, firsts, 0, timed);
    const int node_rounds = std::bit_width(num_nodes - 1);
    for (const auto& holders : in_nodes) add_tree(expert, holders, node_rounds, timed);
  }
  std::ranges::stable_sort(timed, {}, &TimedTransfer::round);
  std::vector<ExpertTransfer> transfers;
  transfers.reserve(timed.size());
  for (const TimedTransfer& one : timed) transfers.push_back(one.transfer);
  return transfers;
}

std::vector<ExpertTransfer> plan_gradient_transfers(const ExpertSlotTable& slots) {
  slots.check("plan_gradient_transfers");
  const auto copies = copies_of(slots);
  std::vector<ExpertTransfer> transfers;
  for (std::int32_t expert = 0; expert < slots.num_experts; ++expert) {
    const Holder home = home_of(slots, expert);
    for (const Holder& copy : copies[expert]) {
      transfers.push_back({expert, copy.rank, copy.slot, home.rank, home.slot});
    }
  }
  return transfers;
}

std::vector<std::vector<std::byte>> simulate_expert_copies(
    const ExpertSlotTable& slots, std::span<const std::span<const std::byte>> home,
    std::int64_t row_bytes) {
  constexpr const char* who = "simulate_expert_copies";
  slots.check(who);
  require(row_bytes >= 0, who, ": row_bytes = ", row_bytes, ", expected >= 0");
  require(std::ssize(home) == slots.num_ranks, who, ": home has ", home.size(),
          " entries, expected one for each of ", slots.num_ranks, " ranks");
  const std::int64_t per_rank = slots.slots_per_rank();
  const std::int64_t home_bytes = slots.experts_per_rank() * row_bytes;
  std::vector<std::vector<std::byte>> result;
  for (std::int32_t r = 0; r < slots.num_ranks; ++r) {
    require(std::ssize(home[r]) == home_bytes, who, ": home[", r, "] has ", home[r].size(),
            " bytes, expected ", slots.experts_per_rank(), " experts of ", row_bytes);
    result.emplace_back(per_rank * row_bytes);
  }
  for (std::int64_t i = 0; i < std::ssize(slots.experts); ++i) {
    if (slots.experts[i] < 0) continue;
    const Holder from = home_of(slots, slots.experts[i]);
    std::copy_n(home[from.rank].begin() + from.slot * row_bytes, row_bytes,
                result[i / per_rank].begin() + i % per_rank * row_bytes);
  }
  return result;
}

namespace detail {

void GradientSum::begin(const std::byte* home, std::int64_t elements, DType dtype) {
  dtype_ = dtype;
  (void)for_number(dtype, [&]<class Number>(Number /*is*/) {
    std::vector<typename Number::Sum> sums(elements);
    const auto* const from = reinterpret_cast<const typename Number::Stored*>(home);
    for (std::int64_t i = 0; i < elements; ++i) sums[i] = Number::load(from[i]);
    sums_ = std::move(sums);
  });
}

void GradientSum::add(const std::byte* copy, std::int64_t first, std::int64_t count) {
  std::visit(
      [&]<class Sum>(std::vector<Sum>& sums) {
        for (std::int64_t i = 0; i < count; ++i) {
          Sum value{};
          std::memcpy(&value, copy + i * std::int64_t{sizeof(Sum)}, sizeof(Sum));
          sums[first + i] += value;
        }
      },
      sums_);
}

void GradientSum::write(std::byte* home) const {
  (void)for_number(dtype_, [&]<class Number>(Number /*is*/) {
    const auto& sums = std::get<std::vector<typename Number::Sum>>(sums_);
    auto* const to = reinterpret_cast<typename Number::Stored*>(home);
    for (std::int64_t i = 0; i < std::ssize(sums); ++i) to[i] = Number::round(sums[i]);
  });
}

}  // namespace detail

std::vector<HostTensor> simulate_expert_copy_gradients(const ExpertSlotTable& slots,
                                                       std::span<const ConstTensorView> home,
                                                       std::span<const ConstTensorView> copies) {
  constexpr const char* who = "simulate_expert_copy_gradients";
  slots.check(who);
  require(std::ssize(home) == slots.num_ranks && std::ssize(copies) == slots.num_ranks, who,
          ": home and copies have ", home.size(), " and ", copies.size(),
          " entries, expected one for each of ", slots.num_ranks, " ranks");
  const DType dtype = home.front().dtype;
  require(detail::is_summed(dtype), who, ": home is ", dtype,
          ", expected float32, float16, bfloat16 or float64");
  const DType wide = detail::gradient_sum_dtype(dtype);
  const std::int64_t elements = home.front().ndim() == 2 ? home.front().shape[1] : 0;
  std::vector<HostTensor> result;
  const auto check = [&](const char* name, std::int32_t rank, const ConstTensorView& view,
                         DType wanted, std::int64_t rows) {
    const Shape shape{rows, elements};
    require(view.dtype == wanted && view.shape == shape &&
                (num_elements(shape, who) == 0 ||
                 view.strides == ConstTensorView::contiguous_strides(shape)),
            who, ": ", name, "[", rank, "] is ", view.dtype, " of shape ", to_string(view.shape),
            ", expected contiguous ", wanted, " of shape ", to_string(shape));
  };
  for (std::int32_t r = 0; r < slots.num_ranks; ++r) {
    check("home", r, home[r], dtype, slots.experts_per_rank());
    check("copies", r, copies[r], wide, slots.num_spare());
    result.emplace_back(dtype, home[r].shape);
    std::copy_n(home[r].data, num_elements(home[r].shape, who) * dtype_bytes(dtype),
                result.back().view().data);
  }
  detail::GradientSum sum;
  const auto transfers = plan_gradient_transfers(slots);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const ExpertTransfer& one = transfers[i];
    std::byte* const to =
        result[one.target].view().data + one.target_slot * elements * dtype_bytes(dtype);
    if (i == 0 || transfers[i - 1].expert != one.expert) sum.begin(to, elements, dtype);
    const std::int64_t row = one.source_slot - slots.experts_per_rank();
    sum.add(copies[one.source].data + row * elements * dtype_bytes(wide), 0, elements);
    if (i + 1 == transfers.size() || transfers[i + 1].expert != one.expert) sum.write(to);
  }
  return result;
}

}  // namespace waybill
