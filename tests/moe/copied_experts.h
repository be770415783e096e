#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "moe/expert_case.h"
#include "waybill/core/random.h"
#include "waybill/moe/expert_routing.h"

namespace waybill::test {

/// Random copies: each spare slot has an expert of another rank, or none. Rank `seed % R` has no
/// copies, and where `seed` is odd one expert lies on all other ranks.
class CopiedExperts {
 public:
  CopiedExperts(std::int32_t num_ranks, std::int32_t per_rank, std::int32_t spare,
                std::uint64_t seed)
      : num_ranks_(num_ranks), per_rank_(per_rank), spare_(spare), seed_(seed) {
    Random random(seed);
    const auto hot = static_cast<std::int32_t>(random.below(num_experts()));
    for (std::int32_t r = 0; r < num_ranks; ++r) {
      std::vector<std::int32_t> others;
      for (std::int32_t e = 0; e < num_experts(); ++e) {
        if (e / per_rank != r) others.push_back(e);
      }
      for (std::int32_t p = 0; p < per_rank; ++p) experts_.push_back(r * per_rank + p);
      const auto drawn = random.permutation(static_cast<std::int32_t>(std::ssize(others)),
                                            static_cast<std::int32_t>(std::ssize(others)));
      const bool has_hot = seed % 2 == 1 && hot / per_rank != r;
      for (std::int32_t s = 0; s < spare; ++s) {
        std::int32_t expert = -1;
        if (s < std::ssize(others) && random.below(4) > 0) expert = others[drawn[s]];
        if (has_hot && s == 0) expert = hot;
        if (has_hot && s > 0 && expert == hot) expert = -1;
        if (r == static_cast<std::int32_t>(seed % num_ranks)) expert = -1;
        experts_.push_back(expert);
        num_copies_ += expert >= 0 ? 1 : 0;
      }
    }
  }

  [[nodiscard]] std::int32_t num_experts() const { return num_ranks_ * per_rank_; }
  [[nodiscard]] std::int64_t num_copies() const { return num_copies_; }
  [[nodiscard]] ExpertSlotTable slots() const { return {num_ranks_, num_experts(), experts_}; }

  /// [R] of [P, row_bytes]
  [[nodiscard]] std::vector<std::vector<std::byte>> home_bytes(std::int64_t row_bytes) const {
    Random random(seed_ + 1);
    std::vector<std::vector<std::byte>> home(num_ranks_);
    for (auto& of_rank : home) {
      of_rank.resize(per_rank_ * row_bytes);
      for (std::byte& byte : of_rank) byte = static_cast<std::byte>(random.below(256));
    }
    return home;
  }

  /// Home's, [R] of [P, n], and those of copies, [R] of [spare, n].
  [[nodiscard]] std::pair<std::vector<HostTensor>, std::vector<HostTensor>> gradients(
      std::int64_t elements, DType dtype) const {
    Random random(seed_ + 2);
    const DType wide = dtype == DType::float64 ? DType::float64 : DType::float32;
    const auto draw = [&](DType of, std::int64_t rows) {
      HostTensor tensor(of, {rows, elements});
      for (std::int64_t i = 0; i < rows * elements; ++i) {
        set_float(tensor, i, random.uniform_float() * 16 - 8);
      }
      return tensor;
    };
    std::pair<std::vector<HostTensor>, std::vector<HostTensor>> drawn;
    for (std::int32_t r = 0; r < num_ranks_; ++r) {
      drawn.first.push_back(draw(dtype, per_rank_));
      drawn.second.push_back(draw(wide, spare_));
    }
    return drawn;
  }

 private:
  std::int32_t num_ranks_;
  std::int32_t per_rank_;
  std::int32_t spare_;
  std::uint64_t seed_;
  std::int64_t num_copies_ = 0;
  std::vector<std::int32_t> experts_;
};

}  // namespace waybill::test
