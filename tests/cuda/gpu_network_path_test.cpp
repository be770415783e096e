// The network path's kernel and its programs, on one GPU without other ranks. The memory of the
// others lies next to that of the rank.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/to_size.h"
#include "cuda/device/params.h"
#include "cuda/experts/nodes/nodes.h"
#include "cuda/network/path_launch.h"
#include "cuda/one_of_many.h"
#include "waybill/core/random.h"

namespace waybill {
namespace {

using cuda::ListPutsParams;
using cuda::NodeFilter;
using detail::to_size;
using test::DeviceBlocks;
using test::OneOfMany;
using Bytes = std::vector<std::uint8_t>;

bool has_bulk_copies() {
  int major = 0;
  test::cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major >= 9;
}

// Paths ------------------------------------------------------------------------------------------

constexpr std::int32_t num_peers = 3;
constexpr std::int64_t window_bytes = std::int64_t{8} << 20;

struct Program {
  std::vector<NetworkStep> steps;
  std::vector<NetworkPut> puts;
  std::vector<BatchSlot> signals;
};

/// Each step has one peer and puts of any size, at places that no other put has; step i raises slot
/// i.
Program random_program(std::int32_t num_steps, std::int32_t max_puts, std::int64_t max_bytes,
                       std::int64_t alignment, bool may_be_empty) {
  Random random(static_cast<std::uint64_t>(num_steps) + 31);
  Program program;
  std::int64_t to = 0;
  for (std::int32_t i = 0; i < num_steps; ++i) {
    const auto peer = static_cast<std::int32_t>(1 + random.below(num_peers));
    const std::int64_t least = may_be_empty ? 0 : 1;
    const std::int64_t count = least + random.below(max_puts + 1 - least);
    program.steps.push_back({0, 0, static_cast<std::int32_t>(program.puts.size()),
                             static_cast<std::int32_t>(count), i, 1});
    program.signals.push_back({peer, i});
    for (std::int64_t k = 0; k < count; ++k) {
      NetworkPut put{};
      put.size_bytes = random.below(max_bytes / alignment + 1) * alignment;
      put.from_bytes = random.below((window_bytes - put.size_bytes) / alignment) * alignment;
      put.to_bytes = to;
      put.peer = peer;
      put.step = i;
      to += put.size_bytes;
      program.puts.push_back(put);
    }
  }
  EXPECT_LE(to, window_bytes);
  return program;
}

/// Runs a program twice, like a graph that is replayed.
void check_path(const Program& program, bool bulk, bool whole_steps, int blocks) {
  OneOfMany one(num_peers + 1, 0);
  DeviceBlocks& device = one.blocks();
  Random random(5);
  Bytes window(window_bytes);
  for (std::uint8_t& byte : window) byte = static_cast<std::uint8_t>(random.below(256));
  const auto num_steps = static_cast<std::int32_t>(program.steps.size());
  auto* const own = reinterpret_cast<std::byte*>(device.upload(window));
  auto* const windows = device.take<std::byte>((num_peers + 1) * window_bytes);
  auto* const slots = device.take<std::uint64_t>(std::int64_t{num_peers + 1} * num_steps);
  auto* const state = device.take<cuda::PathState>(1);

  const cuda::ArriveParams arrive = one.arrive(cuda::FaultKind::moe_dispatch, nullptr);
  cuda::PathParams params{};
  params.world_size = num_peers + 1;
  params.ranks_per_node = 1;
  params.kind = arrive.kind;
  params.arrival = cuda::PathArrival::none;
  params.state = state;
  params.sink = arrive.sink;
  params.window = own;
  params.slots = slots;
  params.tables.steps = device.upload(program.steps);
  params.tables.puts = device.upload(program.puts);
  params.tables.signals = device.upload(program.signals);
  params.tables.done = device.take<unsigned>(num_steps);
  params.tables.num_steps = num_steps;
  params.tables.first_steps = num_steps / 3;  // shared by the groups of a block
  if (!whole_steps) {
    params.tables.num_puts =
        device.upload(std::vector<std::int32_t>{static_cast<std::int32_t>(program.puts.size())});
  }
  cuda::PeerAddresses peers{};
  const auto window_parts = one.peers_of_all(windows, window_bytes);
  const auto slot_parts =
      one.peers_of_all(reinterpret_cast<std::byte*>(slots), std::int64_t{num_steps} * 8);
  peers.windows = window_parts.all;
  peers.slots = {slot_parts.all.bases, slot_parts.all.offset};

  test::cuda_ok(cuda::prepare_peer_path(bulk));
  for (std::uint64_t epoch = 1; epoch <= 2; ++epoch) {
    params.parity = static_cast<std::uint32_t>(epoch % 2);
    test::cuda_ok(cuda::launch_peer_path(params, peers, bulk, blocks, nullptr));
    ASSERT_TRUE(one.finish());
    std::vector<std::uint64_t> want(std::int64_t{num_peers + 1} * num_steps);
    for (std::int32_t i = 0; i < num_steps; ++i) {
      const bool is_raised = program.steps[i].num_puts > 0;
      want[program.signals[i].rank * num_steps + i] = is_raised ? epoch : 0;
    }
    EXPECT_EQ(DeviceBlocks::download(slots, std::ssize(want)), want);
    EXPECT_EQ(DeviceBlocks::download(params.tables.done, num_steps),
              std::vector<unsigned>(num_steps));
    EXPECT_EQ(DeviceBlocks::download(state, 1)[0].epoch, epoch);
  }
  Bytes want(to_size((num_peers + 1) * window_bytes));
  for (const NetworkPut& put : program.puts) {
    std::copy_n(window.begin() + put.from_bytes, put.size_bytes,
                want.begin() + put.peer * window_bytes + put.to_bytes);
  }
  EXPECT_TRUE(DeviceBlocks::download(reinterpret_cast<const std::uint8_t*>(windows),
                                     std::ssize(want)) == want);
}

void check_paths(bool bulk) {
  for (const bool whole_steps : {false, true}) {
    for (const int blocks : {1, 3, 8}) {
      SCOPED_TRACE(testing::Message() << "whole steps " << whole_steps << ", blocks " << blocks);
      // The programs have more puts than a block remembers, large puts, and odd sizes.
      check_path(random_program(40, 25, 512, 16, whole_steps), bulk, whole_steps, blocks);
      check_path(random_program(200, 1, 512, 16, whole_steps), bulk, whole_steps, blocks);
      check_path(random_program(6, 4, 256 << 10, 16, whole_steps), bulk, whole_steps, blocks);
      check_path(random_program(20, 9, 20000, 4, whole_steps), bulk, whole_steps, blocks);
      check_path(random_program(20, 9, 9000, 1, whole_steps), bulk, whole_steps, blocks);
    }
  }
}

TEST(GpuNetworkPath, puts_by_words_arrive_and_raise_their_slots) { check_paths(false); }
TEST(GpuNetworkPath, bulk_puts_arrive_and_raise_their_slots) {
  if (!has_bulk_copies()) GTEST_SKIP() << "needs bulk copies";
  check_paths(true);
}

// Lists ------------------------------------------------------------------------------------------

struct ListCase {
  std::int32_t num_nodes;
  std::int32_t node_ranks;
  std::int32_t max_tokens;
  std::int64_t row_bytes;
  bool wide_ids;
  NodeFilter filter;
  bool planned = false;  ///< rows of a call that has begun with ids, which are there
};

constexpr std::int32_t topk = 4;

/// Compares the lists of a rank with those of a simple model.
class Lists {
 public:
  explicit Lists(const ListCase& how)
      : how_(how),
        rank_(how.num_nodes * how.node_ranks - 1),
        own_(how.num_nodes - 1),
        shift_(cuda::chunk_shift(how.row_bytes, how.max_tokens)),
        chunks_(static_cast<std::int32_t>(cuda::num_chunks(how.max_tokens, shift_))),
        one_(how.num_nodes * how.node_ranks, rank_) {
    Random random(9);
    const bool sums = how.filter == NodeFilter::partial_sums;
    const std::int64_t tokens = std::int64_t{sums ? how.num_nodes : 1} * how.max_tokens;
    for (std::int64_t i = 0; i < tokens * topk; ++i) {
      // Some ranges of tokens go everywhere, and some go nowhere.
      const bool dropped = random.below(4) != 0 && i / topk / 7 % 3 == 1;
      ids_.push_back(
          static_cast<std::int32_t>(dropped ? num_experts() : random.below(num_experts())));
    }
    num_tokens_ = how.max_tokens - (sums ? 0 : std::min(3, how.max_tokens - 1));
  }

  void check() {
    run();
    std::int64_t step = 0;
    const bool begins = how_.filter == NodeFilter::tokens && !how_.planned;
    if (begins) {
      for (std::int32_t k = 0; k + 1 < how_.num_nodes; ++k) expect_whole(k, step++);
    }
    for (std::int32_t k = 0; k + 1 < how_.num_nodes; ++k) {
      for (std::int32_t c = 0; c < chunks_; ++c) expect_chunk(k, c, step++);
    }
    EXPECT_EQ(DeviceBlocks::download(params_.state, 1)[0].epoch, 0U);
    if (!begins) return;
    const auto want = sent_ids();
    EXPECT_EQ(DeviceBlocks::download(params_.made_ids, std::ssize(want)), want);
  }

 private:
  /// The ids as other nodes read them.
  [[nodiscard]] std::vector<std::int32_t> sent_ids() const {
    std::vector<std::int32_t> ids = ids_;
    std::fill(ids.begin() + num_tokens_ * topk, ids.end(), -1);
    return ids;
  }
  [[nodiscard]] std::int32_t num_experts() const { return 2 * how_.num_nodes * how_.node_ranks; }
  [[nodiscard]] std::int32_t node(std::int32_t k) const { return (own_ + 1 + k) % how_.num_nodes; }
  [[nodiscard]] std::int32_t peer(std::int32_t k) const {
    return node(k) * how_.node_ranks + rank_ % how_.node_ranks;
  }
  [[nodiscard]] bool goes(std::int32_t k, std::int32_t token) const {
    const bool sums = how_.filter == NodeFilter::partial_sums;
    if (token >= num_tokens_) return false;
    const std::int64_t first = (std::int64_t{sums ? node(k) : 0} * how_.max_tokens + token) * topk;
    for (std::int64_t i = first; i < first + topk; ++i) {
      const std::int32_t id = ids_[i];
      if (id < num_experts() && id / (2 * how_.node_ranks) == (sums ? own_ : node(k))) return true;
    }
    return false;
  }

  void run() {
    DeviceBlocks& device = one_.blocks();
    const bool sums = how_.filter == NodeFilter::partial_sums;
    auto* const state = device.take<cuda::MoeState>(1);
    params_.m.arrive = one_.arrive(cuda::FaultKind::moe_dispatch, &state->call);
    params_.m.arrive.first_rank = own_ * how_.node_ranks;
    params_.m.arrive.node_ranks = how_.node_ranks;
    params_.m.state = state;
    params_.shape = {.rank = rank_,
                     .world_size = how_.num_nodes * how_.node_ranks,
                     .num_experts = num_experts(),
                     .experts_per_rank = 2,
                     .topk = topk,
                     .num_tokens = num_tokens_,
                     .max_tokens = how_.max_tokens,
                     .compact = 0,
                     .alignment = 1,
                     .num_nodes = how_.num_nodes,
                     .node_ranks = how_.node_ranks,
                     .first_rank = own_ * how_.node_ranks,
                     .capacity_rows = 1};
    params_.begins = 0;
    params_.filter = how_.filter;
    if (sums) {
      params_.ids = device.upload(ids_);
      params_.ready_pieces = 2;
      params_.piece_tokens = (how_.max_tokens / 2 >> shift_ << shift_) + (1 << shift_);
    } else if (how_.planned) {
      params_.begins = -1;
      params_.is_open = true;
      params_.ids = device.upload(sent_ids());
    } else {
      params_.given_ids = how_.wide_ids ? static_cast<const void*>(device.upload(
                                              std::vector<std::int64_t>(ids_.begin(), ids_.end())))
                                        : device.upload(ids_);
      params_.wide_ids = how_.wide_ids;
      params_.dropped_id = num_experts();
      params_.made_ids = device.take<std::int32_t>(std::ssize(ids_));
      params_.num_whole = 2;
      params_.whole[0] = {.from = 64,
                          .from_node_bytes = 0,
                          .to = 128,
                          .row_bytes = 16,
                          .total_bytes = max_put_bytes + 32};
      params_.whole[1] = {
          .from = 0, .from_node_bytes = 0, .to = 0, .row_bytes = 0, .total_bytes = 0};
    }
    params_.num_parts = 2;
    params_.parts[0] = {.from = -4096,
                        .from_node_bytes = sums ? 1 << 20 : 0,
                        .to = 4096,
                        .row_bytes = how_.row_bytes,
                        .total_bytes = 0};
    params_.parts[1] = {
        .from = 1 << 24, .from_node_bytes = 0, .to = 1 << 25, .row_bytes = 16, .total_bytes = 0};
    params_.chunk_shift = shift_;
    params_.num_chunks = chunks_;
    params_.chunk_slot = how_.num_nodes;
    const std::int64_t steps = std::int64_t{how_.num_nodes - 1} * (1 + chunks_);
    puts_ = (how_.num_nodes - 1) * (2 + 2 * (std::int64_t{chunks_} << shift_));
    params_.state = device.take<cuda::PathState>(1);
    params_.steps = device.take<NetworkStep>(steps);
    params_.puts = device.take<NetworkPut>(puts_);
    params_.waits = device.take<BatchSlot>(steps);
    params_.signals = device.take<BatchSlot>(steps);
    test::cuda_ok(cuda::prepare_nodes(DType::float32));
    test::cuda_ok(cuda::launch_list_puts(params_, nullptr));
    ASSERT_TRUE(one_.finish());
    steps_ = DeviceBlocks::download(params_.steps, steps);
    all_ = DeviceBlocks::download(params_.puts, puts_);
    waits_ = DeviceBlocks::download(params_.waits, steps);
    signals_ = DeviceBlocks::download(params_.signals, steps);
  }

  void expect_step(std::int64_t at, std::int32_t k, std::int32_t slot, std::int64_t num_puts) {
    const NetworkStep& step = steps_[at];
    ASSERT_EQ(step.num_puts, num_puts) << at;
    EXPECT_EQ(step.num_signals, 1);
    EXPECT_EQ(signals_[std::int64_t{step.first_signal}].rank, peer(k));
    EXPECT_EQ(signals_[std::int64_t{step.first_signal}].slot, slot);
    ASSERT_LE(step.first_put + step.num_puts, puts_);
  }
  void expect_put(const NetworkPut& put, const cuda::NodePart& part, std::int32_t k,
                  std::int64_t step, std::int64_t offset, std::int64_t size) {
    EXPECT_EQ(put.from_bytes, part.from + node(k) * part.from_node_bytes + offset);
    EXPECT_EQ(put.to_bytes, part.to + offset);
    EXPECT_EQ(put.size_bytes, size);
    EXPECT_EQ(put.peer, peer(k));
    EXPECT_EQ(put.step, step);
  }

  void expect_whole(std::int32_t k, std::int64_t at) {
    expect_step(at, k, own_, 2);
    const NetworkPut* const puts = all_.data() + steps_[at].first_put;
    expect_put(puts[0], params_.whole[0], k, at, 0, max_put_bytes);
    expect_put(puts[1], params_.whole[0], k, at, max_put_bytes, 32);
  }

  void expect_chunk(std::int32_t k, std::int32_t chunk, std::int64_t at) {
    std::vector<std::pair<std::int32_t, std::int32_t>> runs;  // first token, and one after the last
    const std::int32_t begin = chunk << shift_;
    for (std::int32_t t = begin; t < begin + (1 << shift_); ++t) {
      if (!goes(k, t)) continue;
      if (runs.empty() || runs.back().second != t) runs.emplace_back(t, t);
      ++runs.back().second;
    }
    expect_step(at, k, how_.num_nodes + own_ * chunks_ + chunk, 2 * std::ssize(runs));
    if (testing::Test::HasFatalFailure()) return;
    const NetworkStep& step = steps_[at];
    const NetworkPut* put = all_.data() + step.first_put;
    for (const auto& [first, end] : runs) {
      for (const cuda::NodePart& part : params_.parts) {
        expect_put(*put++, part, k, at, first * part.row_bytes, (end - first) * part.row_bytes);
      }
    }
    if (how_.filter != NodeFilter::partial_sums) {
      EXPECT_EQ(step.num_waits, 0);
      return;
    }
    ASSERT_EQ(step.num_waits, 1);
    const BatchSlot wait = waits_[std::int64_t{step.first_wait}];
    EXPECT_EQ(wait.rank, how_.num_nodes * how_.node_ranks);
    EXPECT_EQ(wait.slot, k * 2 + begin / params_.piece_tokens);
  }

  ListCase how_;
  std::int32_t rank_;
  std::int32_t own_;
  std::int32_t shift_;
  std::int32_t chunks_;
  OneOfMany one_;
  std::vector<std::int32_t> ids_;
  std::int32_t num_tokens_ = 0;
  ListPutsParams params_{};
  std::int64_t puts_ = 0;
  std::vector<NetworkStep> steps_;
  std::vector<NetworkPut> all_;
  std::vector<BatchSlot> waits_;
  std::vector<BatchSlot> signals_;
};

TEST(GpuNetworkPath, lists_of_tokens_are_those_of_a_model) {
  for (const std::int32_t tokens : {1, 31, 33, 128, 600, 5000}) {
    for (const std::int64_t row_bytes : {32, 14336}) {
      for (const bool wide : {false, true}) {
        SCOPED_TRACE(testing::Message() << tokens << " tokens of " << row_bytes << " bytes");
        Lists({2, 1, tokens, row_bytes, wide, NodeFilter::tokens}).check();
        Lists({8, 8, tokens, row_bytes, wide, NodeFilter::tokens}).check();
      }
    }
  }
}
TEST(GpuNetworkPath, lists_of_tokens_that_follow_a_plan_are_those_of_a_model) {
  for (const std::int32_t tokens : {1, 33, 600}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    Lists({2, 1, tokens, 14336, false, NodeFilter::tokens, true}).check();
    Lists({8, 8, tokens, 32, false, NodeFilter::tokens, true}).check();
  }
}
TEST(GpuNetworkPath, lists_of_partial_sums_are_those_of_a_model) {
  for (const std::int32_t tokens : {1, 33, 600, 5000}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    Lists({2, 2, tokens, 14336, false, NodeFilter::partial_sums}).check();
    Lists({5, 1, tokens, 300000, false, NodeFilter::partial_sums}).check();
  }
}

TEST(GpuNetworkPath, chunks_have_no_more_than_a_put_and_leave_some_for_every_block) {
  EXPECT_EQ(cuda::chunk_shift(14336, 4096), 3);
  EXPECT_EQ(cuda::chunk_shift(7168, 4096), 4);
  EXPECT_EQ(cuda::chunk_shift(64, 1 << 20), 5);
  EXPECT_EQ(cuda::chunk_shift(14336, 128), 2);
  EXPECT_EQ(cuda::chunk_shift(std::int64_t{1} << 30, 4096), 0);
  EXPECT_EQ(cuda::chunk_shift(16, 1), 0);
  EXPECT_EQ(cuda::num_chunks(1, 5), 1);
  EXPECT_EQ(cuda::num_chunks(33, 5), 2);
}

}  // namespace
}  // namespace waybill
