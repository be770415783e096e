#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace waybill {

/// Random numbers that are the same on every platform: the engine is the standard's mt19937_64,
/// whose output is fixed; the distributions are ours, as the standard's are not.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  /// Any of the 2^64 values.
  [[nodiscard]] std::uint64_t bits() { return engine_(); }

  /// Uniform in [0, bound), unbiased (Lemire, "Fast random integer generation in an interval").
  /// @throws InvalidArgument unless bound >= 1.
  [[nodiscard]] std::int64_t below(std::int64_t bound);

  /// Uniform in [0, 1), a multiple of 2^-24.
  [[nodiscard]] float uniform_float() { return static_cast<float>(engine_() >> 40) * 0x1p-24F; }

  /// Uniform in [0, 1), a multiple of 2^-53.
  [[nodiscard]] double uniform_double() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

  /// The first `count` elements of a uniform permutation of 0..n-1 (Fisher and Yates).
  /// @throws InvalidArgument unless 0 <= count <= n.
  [[nodiscard]] std::vector<std::int32_t> permutation(std::int32_t n, std::int32_t count);

 private:
  std::mt19937_64 engine_;
};

}  // namespace waybill
