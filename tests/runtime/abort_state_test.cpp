#include "runtime/abort_state.h"

#include <gtest/gtest.h>

namespace waybill::detail {
namespace {

/// What a call throws, and what check() says afterwards.
template <class Call>
std::pair<std::string, std::string> texts_of(const Call& call) {
  AbortState abort_state("layer");
  std::pair<std::string, std::string> texts;
  try {
    abort_state.guard(call);
  } catch (const Error& error) {
    texts.first = error.what();
  }
  try {
    abort_state.check("combine");
  } catch (const TransportError& error) {
    texts.second = error.what();
  }
  return texts;
}

TEST(AbortState, a_missed_wait_says_that_ranks_may_be_in_different_calls) {
  const auto [thrown, later] =
      texts_of([] { throw Timeout({.operation = "dispatch", .rank = 1, .peer = 2}); });
  EXPECT_NE(thrown.find("; ranks may be in different calls"), std::string::npos) << thrown;
  EXPECT_EQ(later, "combine: the layer is unusable after a failure: " + thrown);
}

TEST(AbortState, a_disagreement_ends_the_object_a_wrong_argument_does_not) {
  EXPECT_EQ(texts_of([] { throw Disagreement("ranks disagree"); }).second,
            "combine: the layer is unusable after a failure: ranks disagree");
  EXPECT_EQ(texts_of([] { throw InvalidArgument("n = -1"); }).second, "");
}

}  // namespace
}  // namespace waybill::detail
