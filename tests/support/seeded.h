#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>

#include "waybill/core/random.h"

namespace waybill::test {

/// The random values of one case of a property.
class Dice : public Random {
 public:
  using Random::Random;

  /// Uniform in [begin, end).
  template <class Integer>
  [[nodiscard]] Integer in_range(Integer begin, Integer end) {
    return static_cast<Integer>(
        begin + static_cast<Integer>(below(static_cast<std::int64_t>(end - begin))));
  }

  [[nodiscard]] bool coin() { return below(2) == 1; }

  template <class Value>
  [[nodiscard]] Value one_of(std::initializer_list<Value> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }
};

/// Calls property(Dice&) with the seeds 0, 1, ..., and ends with the first that fails or throws,
/// which is named.
template <class Property>
void for_seeds(const Property& property, std::uint64_t seeds = 100) {
  for (std::uint64_t seed = 0; seed < seeds && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed = " << seed);
    Dice dice(seed);
    try {
      property(dice);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "threw: " << error.what();
    }
  }
}

}  // namespace waybill::test
