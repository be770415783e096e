// Whatever values the tables and the schedules hold, plans are compiled or refused: nothing
// overflows (UBSan), nothing is read out of bounds (ASan), no other kind of error escapes.

#include <gtest/gtest.h>

#include <limits>

#include "support/expect_error.h"
#include "support/node_case.h"

namespace waybill {
namespace {

using test::NodeCase;
using test::to_size;

constexpr std::int64_t extremes[] = {INT64_MIN,
                                     INT64_MIN + 1,
                                     INT32_MIN,
                                     -2,
                                     -1,
                                     0,
                                     1,
                                     2,
                                     INT32_MAX,
                                     1LL << 43,
                                     (1LL << 44) - 1,
                                     1LL << 44,
                                     1LL << 61,
                                     INT64_MAX - 1,
                                     INT64_MAX};

template <class Array>
void ravage(Array& array, Random& random) {
  using Value = typename Array::value_type;
  if (array.empty()) return;
  array[random.below(std::ssize(array))] =
      static_cast<Value>(extremes[random.below(std::ssize(extremes))]);
}

void ravage(SparseMetadata& metadata, Random& random) {
  switch (random.below(5)) {
    case 0:
      return ravage(metadata.rank_offsets, random);
    case 1:
      return ravage(metadata.seq_len, random);
    case 2:
      return ravage(metadata.copy_offsets, random);
    case 3:
      return ravage(metadata.dst_rank, random);
    default:
      return ravage(metadata.dst_offset, random);
  }
}

void ravage(std::vector<RelayHop>& hops, Random& random) {
  if (hops.empty()) return;
  RelayHop& hop = hops[random.below(std::ssize(hops))];
  const std::int64_t value = extremes[random.below(std::ssize(extremes))];
  const auto value32 = static_cast<std::int32_t>(value);
  switch (random.below(6)) {
    case 0:
      hop.src_rank = value32;
      return;
    case 1:
      hop.dst_rank = value32;
      return;
    case 2:
      hop.shard = value32;
      return;
    case 3:
      hop.row_begin = value;
      return;
    case 4:
      hop.num_rows = value;
      return;
    default:
      hop.after = value32;
  }
}

/// @return whether it was refused
bool compiles_or_refuses(std::span<const SequencePart> parts, const Topology& topology,
                         std::int64_t batch_bytes) {
  CompileOptions options;
  options.ranks_per_node = topology.ranks_per_node;
  options.plan.relay = RelayUse::always;
  options.chunks = false;
  options.plan.batch_bytes = batch_bytes;
  bool refused = false;
  for (const bool back : {false, true}) {
    try {
      const SequencePlan plan = back ? compile_kv_gradient(parts, Rank{0}, options)
                                     : compile_dispatch(parts, Rank{0}, options);
      EXPECT_GE(plan.window_bytes, 0);
    } catch (const InvalidArgument&) {
      refused = true;
    }
  }
  return refused;
}

TEST(HostilePlans, any_values_of_tables_and_schedules) {
  int refused = 0;
  int compiled = 0;
  for (const Topology topology : {Topology{4, 4}, Topology{4, 2}}) {
    for (test::SequenceCase& sample : test::sequence_cases(topology.world_size, 12)) {
      const RelaySchedule relay = test::random_relay(sample.routing.fwd_kv, 7);
      for (std::uint64_t seed = 0; seed < 60; ++seed) {
        Random random(seed);
        SparseMetadata metadata = sample.routing.fwd_kv;
        RelaySchedule schedule = relay;
        for (std::int64_t n = 1 + random.below(2); n > 0; --n) {
          if (random.below(2) == 0) {
            ravage(metadata, random);
          } else {
            ravage(schedule.hops, random);
          }
        }
        std::vector<SequencePart> parts{{&metadata, {sample.k, sample.v}, &schedule}};
        if (random.below(4) == 0) parts[0].relay = nullptr;
        ++(compiles_or_refuses(parts, topology, 64) ? refused : compiled);
      }
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(compiled, 50);
}

/// Entries of 2^44 - 1 rows for many ranks, and as many hops: sums of rows and bytes exceed 2^63
/// where nothing stops them.
TEST(HostilePlans, rows_of_all_ranks) {
  constexpr std::int64_t rows = (std::int64_t{1} << 44) - 1;
  constexpr std::int32_t world = 256;
  SparseMetadata metadata;
  metadata.world_size = world;
  metadata.rank_offsets.assign(world + 1, 256);
  metadata.rank_offsets[0] = 0;
  metadata.copy_offsets.push_back(0);
  for (int entry = 0; entry < 256; ++entry) {
    metadata.seq_len.push_back(rows);
    for (std::int32_t r = 0; r < world; ++r) {
      metadata.dst_rank.push_back(r);
      metadata.dst_offset.push_back(rows);
    }
    metadata.copy_offsets.push_back(std::ssize(metadata.dst_rank));
  }
  RelaySchedule relay;
  relay.links.resize(world);
  for (std::int32_t i = 0; i < 1 << 20; ++i)
    relay.hops.push_back({0, 1 + i % (world - 1), 0, 0, 0, rows, -1});
  for (const std::int64_t hidden : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 27}) {
    for (const std::int32_t ranks_per_node : {world, 2}) {
      for (const RelaySchedule* schedule :
           {static_cast<const RelaySchedule*>(nullptr), &std::as_const(relay)}) {
        const std::vector<SequencePart> parts{{&metadata, {{DType::bfloat16, hidden}}, schedule}};
        EXPECT_TRUE(compiles_or_refuses(parts, {world, ranks_per_node}, 0)) << hidden;
      }
    }
  }
}

/// Rows that ranks pass on, entry by entry within bounds.
TEST(HostilePlans, rows_passed_on) {
  const std::int64_t rows = (std::int64_t{1} << 43) - 1;
  const QkvRouting routing =
      compute_qkv_routing(test::plain_plan(3, {{1}, {1}, {1}}, {1, 1, 1}, KvLayout::per_rank));
  SparseMetadata metadata = routing.fwd_kv;
  metadata.seq_len[0] = rows;
  RelaySchedule relay;
  relay.links.resize(3);
  for (std::int32_t i = 0; i < 1 << 21; ++i) {
    relay.hops.push_back({0, 2, 0, 0, 0, rows, -1});
    relay.hops.push_back({2, 1, 0, 1, 0, rows, 2 * i});
  }
  const std::vector<SequencePart> parts{{&metadata, {{DType::uint8, 1}}, &relay}};
  CompileOptions options;
  options.plan.relay = RelayUse::always;
  EXPECT_TRUE(test::rejects([&] { (void)compile_dispatch(parts, Rank{0}, options); },
                            {"the relay hops move", "rows, expected below 2^60"}));
}

/// Rows so wide that a row's bytes do not fit 63 bits, alone or with those of other tensors.
TEST(HostilePlans, widths_of_rows) {
  const test::SequenceCase sample = test::sequence_cases(4, 1).back();
  for (const std::int64_t hidden : extremes) {
    for (const DType dtype : {DType::uint8, DType::bfloat16, DType::float64}) {
      const TensorFormat format{dtype, hidden};
      std::vector<SequencePart> parts{{&sample.routing.fwd_kv, {format, format, format}}};
      for (const Topology topology : {Topology{4, 4}, Topology{4, 2}})
        compiles_or_refuses(parts, topology, 64);
    }
  }
}

TEST(HostilePlans, options) {
  const test::SequenceCase sample = test::sequence_cases(4, 1).back();
  const std::vector<SequencePart> parts{{&sample.routing.fwd_kv, {sample.k, sample.v}}};
  for (const std::int64_t value : extremes) {
    const auto run = [&](auto&& set) {
      CompileOptions options;
      options.ranks_per_node = 2;
      options.split_network = true;
      set(options);
      try {
        (void)compile_dispatch(parts, Rank{0}, options);
        (void)compile_kv_gradient(parts, Rank{0}, options);
      } catch (const InvalidArgument&) {
      }
    };
    const auto value32 = static_cast<std::int32_t>(value);
    run([&](CompileOptions& options) { options.plan.chunk_bytes = value; });
    run([&](CompileOptions& options) {
      options.separate_local_copies = true;
      options.num_sms = value32;
    });
    run([&](CompileOptions& options) { options.ranks_per_node = value32; });
    run([&](CompileOptions& options) { options.plan.batch_bytes = value; });
    run([&](CompileOptions& options) {
      options.two_sided_network = true;
      options.plan.phase_bytes = value;
    });
  }
}

}  // namespace
}  // namespace waybill
