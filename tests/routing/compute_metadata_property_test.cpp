#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "support/difference.h"
#include "support/seeded.h"
#include "support/slow_model.h"
#include "waybill/core/random.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill {
namespace {

using test::Dice;
using test::difference;
using test::for_seeds;

struct Dispatch {
  IndexArray len;
  IndexArray dispatch;
};

/// Holes, interior padding and shards of length 0. copies = 0: 2-D. May leave rows undispatched.
Dispatch random_dispatch(std::uint64_t seed, std::int64_t world_size, std::int64_t num_shards,
                         std::int64_t copies, bool undispatched) {
  Random random(seed);
  const std::int64_t holes = random.below(4);  // 0: none, 3: three of four
  Dispatch made{IndexArray(Shape{world_size, num_shards}), {}};
  Shape shape{world_size, num_shards};
  if (copies > 0) shape.push_back(copies);
  made.dispatch = IndexArray::full(shape, -1);
  const std::size_t slots = copies > 0 ? static_cast<std::size_t>(copies) : 1;
  for (std::size_t shard = 0; shard < made.len.i64().size(); ++shard) {
    bool sent = false;
    for (std::size_t c = 0; c < slots; ++c) {
      if (random.below(4) < holes) continue;
      made.dispatch.i64()[shard * slots + c] = random.below(world_size);
      sent = true;
    }
    if (sent || undispatched) made.len.i64()[shard] = random.below(5) == 0 ? 0 : random.below(30);
  }
  return made;
}

std::string differs_from_model(const Dispatch& made, Undispatched undispatched) {
  const std::int64_t copies = made.dispatch.ndim() == 3 ? made.dispatch.dim(2) : 0;
  const auto sends = test::model_q_sends(made.len, made.dispatch);
  const DispatchMetadata got = compute_metadata(made.len, made.dispatch, false, undispatched);
  return difference(got.fwd,
                    test::model_forward(made.len, copies, sends, test::count_with_rows(made.len))) +
         difference(got.rev,
                    test::model_reverse(made.len, copies, sends, test::Counted::with_rows));
}

TEST(ComputeMetadataProperty, EqualsTheSlowModel) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const bool undispatched = dice.coin();
    const auto world_size = dice.in_range<std::int64_t>(1, 9);
    const auto num_shards = dice.in_range<std::int64_t>(0, 7);
    const auto copies = dice.in_range<std::int64_t>(0, 5);
    const Dispatch made = random_dispatch(seed, world_size, num_shards, copies, undispatched);
    EXPECT_EQ(differs_from_model(made, undispatched ? Undispatched::keep : Undispatched::reject),
              "");
  });
}

TEST(ComputeMetadataModel, WorldsUpTo64) {
  for (std::int64_t world_size = 1; world_size <= 64; ++world_size) {
    for (const std::int64_t copies : {0, 1, 3}) {
      const Dispatch made = random_dispatch(static_cast<std::uint64_t>(world_size * 10 + copies),
                                            world_size, 4, copies, false);
      EXPECT_EQ(differs_from_model(made, Undispatched::reject), "") << world_size << ", " << copies;
    }
  }
}

TEST(ComputeMetadataProperty, IntermediatesAgreeWithTheTables) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const auto world_size = dice.in_range<std::int64_t>(1, 6);
    const auto num_shards = dice.in_range<std::int64_t>(0, 6);
    const auto copies = dice.in_range<std::int64_t>(1, 4);
    const Dispatch made = random_dispatch(seed, world_size, num_shards, copies, false);
    const DispatchMetadata got = compute_metadata(made.len, made.dispatch, true);
    const Shape shape{world_size, num_shards, copies, world_size};
    IndexArray one_hot(shape);
    IndexArray tokens(shape);
    IndexArray received(Shape{world_size});
    for (const test::Sent& sent : test::model_q_sends(made.len, made.dispatch)) {
      test::element(one_hot, {sent.src, sent.shard, sent.copy, sent.dst}) = 1;
      test::element(tokens, {sent.src, sent.shard, sent.copy, sent.dst}) = sent.len;
      test::element(received, {sent.dst}) += 1;
    }
    ASSERT_TRUE(got.intermediates.has_value());
    EXPECT_EQ(difference("seq_to_dst", got.intermediates->seq_to_dst, one_hot), "");
    EXPECT_EQ(difference("tokens", got.intermediates->tokens_to_dst_per_dispatch, tokens), "");
    EXPECT_EQ(difference("received", got.intermediates->num_received_seqs, received), "");
  });
}

TEST(ComputeMetadataProperty, A2DDispatchIsA3DOneWithOneCopy) {
  for_seeds([](Dice& dice) {
    const std::uint64_t seed = dice.bits();
    const auto world_size = dice.in_range<std::int64_t>(1, 6);
    const auto num_shards = dice.in_range<std::int64_t>(0, 6);
    const Dispatch flat = random_dispatch(seed, world_size, num_shards, 0, false);
    const DispatchMetadata two = compute_metadata(flat.len, flat.dispatch, true);
    const DispatchMetadata three =
        compute_metadata(flat.len, flat.dispatch.reshaped({world_size, num_shards, 1}), true);
    EXPECT_EQ(three.fwd.dst_offset.reshaped({world_size, num_shards}), two.fwd.dst_offset);
    EXPECT_EQ(three.rev.dst_offset, two.rev.dst_offset);
    EXPECT_TRUE(three.rev.seq_recv_mask.has_value());
    EXPECT_FALSE(two.rev.seq_recv_mask.has_value());
    EXPECT_FALSE(two.rev.recv_seq_lens.has_value());
    EXPECT_EQ(three.intermediates->seq_to_dst, two.intermediates->seq_to_dst);
  });
}

}  // namespace
}  // namespace waybill
