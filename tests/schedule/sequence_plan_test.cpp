#include "schedule/sequence_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "core/to_size.h"
#include "schedule/check_sequence_plans.h"
#include "support/expect_error.h"
#include "support/sequence_case.h"

namespace waybill {
namespace {

using test::rejects;
using test::to_size;

/// Does what the chunks say, on windows in one process.
std::vector<HostTensor> interpret(const std::vector<SequencePlan>& plans,
                                  const std::vector<HostTensor>& sources) {
  std::vector<HostTensor> windows(plans.size());
  for (auto& window : windows) window = HostTensor(DType::uint8, {plans[0].window_bytes});
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const std::int64_t row_bytes = plans[r].tensors[0].row_bytes();
    for (const RowChunk& chunk : plans[r].chunks) {
      const std::byte* from = sources[r].bytes().data() + chunk.row * row_bytes + chunk.col_bytes;
      for (std::int32_t p = 0; p < chunk.num_addresses; ++p) {
        const std::uint64_t address = plans[r].addresses[chunk.first_address + p];
        std::memcpy(
            windows[address >> address_rank_shift].bytes().data() + (address & address_offset_mask),
            from, to_size(chunk.rows) * to_size(chunk.part_bytes));
      }
    }
  }
  return windows;
}

std::vector<SequencePlan> compile_all(const SparseMetadata& metadata, const TensorFormat& format,
                                      std::int64_t chunk_bytes) {
  std::vector<SequencePlan> plans;
  const SequencePart part{&metadata, {format}};
  for (std::int32_t r = 0; r < metadata.world_size; ++r) {
    plans.push_back(compile_dispatch({&part, 1}, Rank{r}, {chunk_bytes}));
  }
  return plans;
}

TEST(compile_dispatch, chunks_deliver_what_the_simulation_delivers) {
  for (const auto& sample : test::sequence_cases(5, 30)) {
    for (const SparseMetadata* metadata : {&sample.routing.fwd_q, &sample.routing.fwd_kv}) {
      for (const std::int64_t chunk_bytes : {16, 256, 8192}) {
        const auto plans = compile_all(*metadata, sample.q, chunk_bytes);
        const auto sources = test::random_tensors(sample.q, test::rows_sent(*metadata), 1);
        const auto windows = interpret(plans, sources);
        const auto expected = test::simulated(*metadata, sources);
        for (std::size_t r = 0; r < plans.size(); ++r) {
          ASSERT_EQ(plans[r].own_rows[0], sources[r].shape()[0]);
          ASSERT_EQ(plans[r].window_rows[0], expected[r].shape()[0]);
          ASSERT_TRUE(std::ranges::equal(expected[r].bytes(),
                                         windows[r].bytes().first(expected[r].size_bytes())))
              << sample.name << ", rank " << r << ", chunks of " << chunk_bytes;
        }
      }
    }
  }
}

TEST(compile_dispatch, windows_have_room_for_as_many_rows_as_are_asked_for) {
  for (const auto& sample : test::sequence_cases(9, 10)) {
    const SparseMetadata& q = sample.routing.fwd_q;
    const SparseMetadata& kv = sample.routing.fwd_kv;
    constexpr std::int64_t more = 5000;
    const std::vector<SequencePart> usual{{&q, {sample.q}}, {&kv, {sample.k}}};
    std::vector<SequencePart> roomy = usual;
    for (SequencePart& part : roomy) part.min_window_rows = more;
    const SequencePlan before = compile_dispatch(usual, Rank{0});
    for (std::int32_t r = 0; r < q.world_size; ++r) {
      const SequencePlan plan = compile_dispatch(roomy, Rank{r});
      const std::int64_t q_bytes = more * sample.q.row_bytes();
      EXPECT_EQ(plan.window_rows, (std::vector<std::int64_t>{more, more}));
      EXPECT_EQ(plan.window_offsets[1], (q_bytes + 255) / 256 * 256);
      EXPECT_EQ(plan.own_rows, compile_dispatch(usual, Rank{r}).own_rows);
      EXPECT_NE(plan.fingerprint, before.fingerprint);
    }
    roomy[0].min_window_rows = 1;
    EXPECT_GE(compile_dispatch(roomy, Rank{0}).window_rows[0], before.window_rows[0]);
    roomy[0].min_window_rows = -1;
    EXPECT_TRUE(rejects([&] { (void)compile_dispatch(roomy, Rank{0}); }, {"min_window_rows = -1"}));
  }
}

TEST(compile_dispatch, chunks_keep_their_limits) {
  for (const auto& sample : test::sequence_cases(11, 8)) {
    for (const SequencePlan& plan : compile_all(sample.routing.fwd_kv, sample.k, 64)) {
      const std::int64_t row_bytes = sample.k.row_bytes();
      for (const RowChunk& chunk : plan.chunks) {
        ASSERT_GE(chunk.num_addresses, 1);
        ASSERT_LE(chunk.num_addresses, max_addresses_sent);
        ASSERT_LE(std::int64_t{chunk.rows} * chunk.part_bytes, 64);
        ASSERT_GE(chunk.part_bytes, 1);
        ASSERT_TRUE(chunk.rows == 1 || chunk.part_bytes == row_bytes);
        ASSERT_LE(chunk.col_bytes + chunk.part_bytes, row_bytes);
      }
    }
  }
}

TEST(compile_dispatch, destinations_alternate_from_the_next_rank_and_what_stays_comes_last) {
  constexpr std::int32_t world = 4;
  std::vector<std::int32_t> dst;
  for (int s = 0; s < 16; ++s) dst.push_back(s % 4);
  const std::vector<std::vector<std::int64_t>> shards(4, std::vector<std::int64_t>(4, 10));
  const auto plan = test::plain_plan(world, shards, dst, KvLayout::per_rank);
  const auto routing = compute_qkv_routing(plan);
  const auto plans = compile_all(routing.fwd_q, {DType::uint8, 16}, 16);
  for (std::size_t r = 0; r < plans.size(); ++r) {
    ASSERT_EQ(plans[r].chunks.size(), 40U);
    for (std::size_t i = 0; i < 40; ++i) {
      const auto address = plans[r].addresses[plans[r].chunks[i].first_address];
      ASSERT_EQ(address >> address_rank_shift, i < 30 ? (r + 1 + i % 3) % 4 : r)
          << "rank " << r << ", chunk " << i;
    }
    EXPECT_EQ(plans[r].num_wire_chunks, 30);
    EXPECT_EQ(plans[r].wire_bytes, (std::vector<std::int64_t>(4, 160)));
  }
}

TEST(compile_dispatch, unequal_destinations_are_spread_over_the_whole) {
  const auto plan = test::plain_plan(3, {{90, 9}, {}, {}}, {1, 2}, KvLayout::per_rank);
  const auto routing = compute_qkv_routing(plan);
  const SequencePlan compiled = compile_all(routing.fwd_q, {DType::uint8, 16}, 16)[0];
  std::vector<std::size_t> to_two;
  for (std::size_t i = 0; i < compiled.chunks.size(); ++i) {
    if (compiled.addresses[compiled.chunks[i].first_address] >> address_rank_shift == 2) {
      to_two.push_back(i);
    }
  }
  ASSERT_EQ(to_two.size(), 9U);
  for (std::size_t k = 0; k < 9; ++k)
    EXPECT_NEAR(static_cast<double>(to_two[k]), static_cast<double>(11 * k + 5), 1);
}

TEST(compile_dispatch, several_tensors_share_a_window_without_overlap) {
  const auto sample = test::sequence_cases(4, 10).back();
  const SequencePart parts[] = {{&sample.routing.fwd_q, {sample.q}},
                                {&sample.routing.fwd_kv, {sample.k, sample.v}}};
  std::int64_t largest = 0;
  for (std::int32_t r = 0; r < 4; ++r) {
    const auto plan = compile_dispatch(parts, Rank{r});
    ASSERT_EQ(plan.tensors.size(), 3U);
    std::int64_t end = 0;
    for (std::size_t t = 0; t < 3; ++t) {
      EXPECT_EQ(plan.window_offsets[t] % 256, 0);
      EXPECT_GE(plan.window_offsets[t], end);
      end = plan.window_offsets[t] + plan.window_rows[t] * plan.tensors[t].row_bytes();
    }
    EXPECT_LE(end, plan.window_bytes);
    largest = std::max(largest, end);
  }
  EXPECT_GT(largest, compile_dispatch(parts, Rank{0}).window_bytes - 256);
}

TEST(compile_dispatch, long_local_rows_stand_apart) {
  // Rank 0 keeps 6000 rows of 1 KiB and sends 3000; the others keep single rows.
  const auto routing = compute_qkv_routing(test::plain_plan(
      3, {{4000, 3000, 2000}, {1, 1}, {1, 1}}, {0, 1, 0, 1, 2, 2, 0}, KvLayout::per_rank));
  const SequencePart part{&routing.fwd_q, {{DType::uint8, 1024}}};
  CompileOptions options;
  options.separate_local_copies = true;
  // 24 SMs fill the links with what 8 of them send in the time, and move the rest beside it.
  options.num_sms = 24;
  EXPECT_TRUE(compile_dispatch({&part, 1}, Rank{0}, options).local_segments.empty());
  options.num_sms = 23;
  const SequencePlan apart = compile_dispatch({&part, 1}, Rank{0}, options);
  const SequencePlan whole = compile_dispatch({&part, 1}, Rank{0});
  EXPECT_EQ(apart.wire_bytes, whole.wire_bytes);
  std::int64_t rows = 0;
  for (const RowSegment& segment : apart.local_segments) {
    EXPECT_EQ(apart.segment_addresses[segment.first_destination] >> address_rank_shift, 0U);
    rows += segment.rows;
  }
  EXPECT_EQ(rows, 6000);
  for (const std::uint64_t address : apart.addresses) EXPECT_NE(address >> address_rank_shift, 0U);
  EXPECT_EQ(apart.chunks.size(), 375U);  // 3000 rows, 8 each
  EXPECT_EQ(whole.chunks.size(), 1125U);
  EXPECT_TRUE(compile_dispatch({&part, 1}, Rank{1}, options).local_segments.empty());
}

TEST(compile_dispatch, segments_alone_become_the_same_chunks) {
  for (const auto& sample : test::sequence_cases(4, 12, 9)) {
    const SequencePart part{&sample.routing.fwd_kv, {sample.k, sample.v}};
    CompileOptions options;
    options.chunks = false;
    SequencePlan plan = compile_dispatch({&part, 1}, Rank{2}, options);
    EXPECT_TRUE(plan.chunks.empty() && plan.addresses.empty());
    expand_chunks(plan);
    const SequencePlan whole = compile_dispatch({&part, 1}, Rank{2});
    ASSERT_EQ(plan.addresses, whole.addresses) << sample.name;
    ASSERT_EQ(plan.chunks.size(), whole.chunks.size());
    ASSERT_TRUE(plan.chunks.empty() || std::memcmp(plan.chunks.data(), whole.chunks.data(),
                                                   whole.chunks.size() * sizeof(RowChunk)) == 0);
  }
}

TEST(compile_kv_gradient, places_keep_the_order_of_the_copies) {
  for (const auto& sample : test::sequence_cases(4, 10)) {
    const SequencePart part{&sample.routing.fwd_kv, {sample.k}};
    const auto& metadata = sample.routing.fwd_kv;
    for (std::int32_t r = 0; r < 4; ++r) {
      const auto plan = compile_kv_gradient({&part, 1}, Rank{r});
      std::map<std::int64_t, std::int64_t> entry_of_row;
      std::int64_t row = 0;
      for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
        for (std::int64_t k = 0; k < metadata.seq_len[j]; ++k) entry_of_row[row++] = j;
      }
      std::int64_t bytes = 0;
      for (const RowChunk& chunk : plan.chunks) {
        const std::int64_t entry = entry_of_row.at(chunk.row);
        ASSERT_EQ(chunk.num_addresses,
                  metadata.destination_end(entry) - metadata.destination_begin(entry));
        for (std::int32_t c = 0; c < chunk.num_addresses; ++c) {
          ASSERT_EQ(
              plan.addresses[chunk.first_address + c] >> address_rank_shift,
              static_cast<std::uint64_t>(metadata.dst_rank[metadata.destination_begin(entry) + c]));
        }
        bytes += std::int64_t{chunk.rows} * chunk.part_bytes;
      }
      EXPECT_EQ(bytes, row * sample.k.row_bytes());  // every row once, those without copies too
    }
  }
}

std::vector<SequencePlan> gradients_apart(const SequencePart& part) {
  CompileOptions options;
  options.separate_local_copies = true;
  options.chunks = false;
  std::vector<SequencePlan> plans;
  for (std::int32_t r = 0; r < part.metadata->world_size; ++r) {
    plans.push_back(compile_kv_gradient({&part, 1}, Rank{r}, options));
  }
  return plans;
}

std::int64_t rows_of(const auto& pieces, std::int32_t tensor) {
  std::int64_t rows = 0;
  for (const auto& piece : pieces) rows += piece.tensor == tensor ? piece.rows : 0;
  return rows;
}

TEST(compile_kv_gradient, long_runs_with_one_copy_that_stay_stand_apart) {
  // Rank 0 keeps 6000 rows of 1 KiB, of which 2000 and 4000 adjoin, and 3 rows; it sends 3000.
  QkvPlan plan = test::plain_plan(3, {{2000, 4000, 3000, 3}, {1, 1}, {1, 1}},
                                  {0, 0, 1, 0, 1, 2, 2, 0}, KvLayout::per_rank);
  plan.doc_shard_offsets = {0, 1, 2, 3, 4, 5, 6, 7, 8};  // a document each
  const QkvRouting routing = compute_qkv_routing(plan);
  SequencePart part{&routing.fwd_kv, {{DType::float32, 256}, {DType::float32, 256}}};
  const auto plans = gradients_apart(part);
  EXPECT_EQ(test::check_sequence_plans(plans, {&part, 1}), std::vector<std::string>{});
  ASSERT_EQ(plans[0].local_segments.size(), 2U);  // a run of each tensor
  EXPECT_EQ(plans[0].local_segments[0].rows, 6000);
  EXPECT_EQ(rows_of(plans[0].segments, 1), 3003);
  for (std::int32_t t : {0, 1}) {
    EXPECT_EQ(rows_of(plans[0].staged, t), plans[0].window_rows[t] - 6000);
    EXPECT_EQ(rows_of(plans[1].staged, t), plans[1].window_rows[t]);
  }
  EXPECT_TRUE(plans[1].local_segments.empty());
  EXPECT_EQ(plans[0].wire_bytes, compile_kv_gradient({&part, 1}, Rank{0}).wire_bytes);
  EXPECT_TRUE(compile_kv_gradient({&part, 1}, Rank{0}).local_segments.empty());
  part.tensors[0].hidden = part.tensors[1].hidden = 80;  // 3.7 MiB together
  EXPECT_TRUE(gradients_apart(part)[0].local_segments.empty());
}

TEST(compile_kv_gradient, what_stands_apart_is_what_has_one_copy_here) {
  for (const auto& sample : test::sequence_cases(4, 30)) {
    const SparseMetadata& metadata = sample.routing.fwd_kv;
    const SequencePart part{&metadata, {{DType::float64, std::int64_t{1} << 19}}};  // 4 MiB per row
    auto plans = gradients_apart(part);
    ASSERT_EQ(test::check_sequence_plans(plans, {&part, 1}), std::vector<std::string>{})
        << sample.name;
    for (std::int32_t r = 0; r < 4; ++r) {
      std::int64_t alone = 0;
      for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
        const std::int64_t copy = metadata.destination_begin(j);
        if (metadata.destination_end(j) - copy == 1 && metadata.dst_rank[copy] == r)
          alone += metadata.seq_len[j];
      }
      ASSERT_EQ(rows_of(plans[r].local_segments, 0), alone) << sample.name;
      ASSERT_EQ(rows_of(plans[r].staged, 0), plans[r].window_rows[0] - alone) << sample.name;
    }
    if (plans[1].staged.empty()) continue;
    plans[1].staged[0].row += 1;
    ASSERT_NE(test::check_sequence_plans(plans, {&part, 1}), std::vector<std::string>{})
        << sample.name;
  }
}

TEST(compile_dispatch, names_what_is_wrong) {
  const auto good =
      compute_qkv_routing(test::plain_plan(2, {{3}, {4}}, {1, 0}, KvLayout::per_rank));
  const auto rejected = [&](const auto& damage, std::string_view text, TensorFormat format = {},
                            std::int32_t rank = 0, std::int64_t chunk_bytes = 8192) {
    SparseMetadata metadata = good.fwd_kv;
    damage(metadata);
    const SequencePart part{&metadata, {format}};
    EXPECT_TRUE(rejects(
        [&] {
          (void)compile_dispatch({&part, 1}, Rank{rank}, {chunk_bytes});
        },
        {text}));
  };
  const TensorFormat format{DType::uint8, 4};
  rejected([](auto& m) { m.dst_rank[0] = 2; }, "dst_rank[0] = 2", format);
  rejected([](auto& m) { m.dst_rank[0] = -1; }, "dst_rank[0] = -1", format);
  rejected([](auto& m) { m.dst_offset[0] = -5; }, "dst_offset[0] = -5", format);
  rejected([](auto& m) { m.seq_len[1] = -1; }, "seq_len[1] = -1", format);
  rejected([](auto& m) { m.rank_offsets.pop_back(); }, "rank_offsets has 2 values", format);
  rejected([](auto& m) { m.copy_offsets.back() = 9; }, "copy_offsets goes from 0 to 9", format);
  rejected([](auto& m) { m.dst_offset.pop_back(); }, "dst_offset has", format);
  rejected([](auto& m) { m.world_size = 0; }, "world_size = 0", format);
  rejected([](auto& m) { m.dst_offset[0] = std::int64_t{1} << 43; }, "would need 2^44", format);
  rejected([](auto&) {}, "rank = 2", format, 2);
  rejected([](auto&) {}, "chunk_bytes = 24", format, 0, 24);
  rejected([](auto&) {}, "hidden = -1", {DType::uint8, -1});
  const SequencePart part{&good.fwd_kv, {{DType::int8, 4}}};
  EXPECT_TRUE(rejects([&] { (void)compile_kv_gradient({&part, 1}, Rank{0}); }, {"dtype = int8"}));
  EXPECT_TRUE(rejects([] { (void)compile_dispatch({}, Rank{0}); }, {"parts are empty"}));
}

}  // namespace
}  // namespace waybill
