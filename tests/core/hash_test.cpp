#include "core/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace waybill {
namespace {

TEST(Hash, depends_on_order_length_and_every_value) {
  const std::vector<std::int64_t> a{1, 2, 3};
  const std::vector<std::int64_t> b{1, 3, 2};
  const std::vector<std::int64_t> c{1, 2, 3, 0};
  std::set<std::uint64_t> values;
  for (const auto& v : {a, b, c}) values.insert(Hash().add(std::span(v)).value());
  values.insert(Hash().add(1.0).value());
  values.insert(Hash().add(std::int64_t{1}).value());
  EXPECT_EQ(values.size(), 5U);
  // A plan made elsewhere has the same hash: pinned.
  EXPECT_EQ(Hash().add(std::span(a)).value(), Hash()
                                                  .add(std::uint64_t{3})
                                                  .add(std::int64_t{1})
                                                  .add(std::int64_t{2})
                                                  .add(std::int64_t{3})
                                                  .value());
}

}  // namespace
}  // namespace waybill
