#include "runtime/fingerprint.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "waybill/core/error.h"

namespace waybill {
namespace {

const CallFingerprint base{.call = CollectiveCall::combine,
                           .flags = static_cast<std::uint8_t>(CallFlag::weights),
                           .origin = 7,
                           .plan = 0x1234'5678'9ABC'DEF0,
                           .formats = 0x0FED'CBA9'8765'4321,
                           .options = 0x1111'2222'3333'4444};

std::string difference(const CallFingerprint& theirs) {
  return describe_disagreement("combine", 5, Rank{0}, pack_fingerprint(base), Rank{2},
                               pack_fingerprint(theirs));
}

TEST(Fingerprint, names_the_field_that_differs) {
  CallFingerprint other = base;
  other.call = CollectiveCall::expert_dispatch;
  EXPECT_EQ(
      difference(other),
      "combine: ranks disagree in call 5: rank 0 calls combine, rank 2 dispatch; expected the "
      "same on all ranks");
  other = base;
  other.flags |= static_cast<std::uint8_t>(CallFlag::weighted);
  EXPECT_NE(difference(other).find("weighted = false on rank 0, true on rank 2"),
            std::string::npos);
  other = base;
  other.origin = 8;
  EXPECT_NE(difference(other).find("belongs to dispatch 7 on rank 0, to dispatch 8 on rank 2"),
            std::string::npos);
  other = base;
  other.plan ^= std::uint64_t{1} << 40;
  EXPECT_NE(difference(other).find("the plan differs: hash 12345"), std::string::npos);
  other.formats ^= std::uint64_t{1} << 40;
  EXPECT_NE(difference(other).find("the tensors' format"), std::string::npos);
  other = base;
  other.options ^= std::uint64_t{1} << 40;
  EXPECT_NE(difference(other).find("an option differs"), std::string::npos);
}

TEST(Fingerprint, a_word_says_of_which_call_it_is) {
  const FingerprintWords words = pack_fingerprint(base);
  for (const std::uint64_t word : words) {
    EXPECT_EQ(word & fingerprint_tag_mask, 0U);
    EXPECT_TRUE(is_of_call(tagged_word(word, 70'001), 70'001));
    EXPECT_FALSE(is_of_call(tagged_word(word, 69'999), 70'001));
    EXPECT_FALSE(is_of_call(0, 70'001));
  }
  FingerprintWords tagged = words;
  for (std::uint64_t& word : tagged) word = tagged_word(word, 3);
  EXPECT_TRUE(same_call(words, tagged));
}

TEST(Fingerprint, slots_of_ranks_and_parities_are_apart_and_aligned) {
  std::set<std::int64_t> seen;
  constexpr std::int64_t signals = 11;
  constexpr std::int32_t world = 3;
  for (const std::uint64_t epoch : {4U, 5U}) {
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const std::int64_t slot = fingerprint_slot(signals, world, epoch, rank);
      EXPECT_EQ(slot % 4, 0);
      EXPECT_GE(slot, signals);
      EXPECT_LE(slot + 4, with_fingerprints(signals, world));
      EXPECT_TRUE(seen.insert(slot).second);
    }
  }
}

}  // namespace
}  // namespace waybill
