#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device_arena.h"
#include "cuda/ways.h"
#include "experts/expert_executor.h"
#include "experts/expert_memory.h"
#include "moe/expert_case.h"
#include "support/sequence_expected.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::test {

/// A world of the config's nodes.
inline ThreadWorldOptions options_of(const EPConfig& config) {
  ThreadWorldOptions options = world_options();
  options.ranks_per_node = config.local_world_size;
  return options;
}

/// The memory, call numbers and executor of one rank's layer, without the layer's checks and
/// growth. Collective.
class ExpertRig {
 public:
  ExpertRig(World& world, EPConfig config, EPDispatchOptions options, std::int64_t capacity_rows,
            int num_sms)
      : world_(world), config_(config), options_(options), num_sms_(num_sms) {
    config_.rank = to_int(world.rank());
    memory_.workspace_layout = expert_workspace_layout(config_, options_);
    Transport& transport = world.transport();
    take_windows(capacity_rows);
    memory_.workspace = transport.allocate(memory_.workspace_layout.total, "workspace");
    memory_.signals = transport.allocate_signals(
        with_fingerprints(num_layer_signals(config_.world_size), config_.world_size), "signals");
    executor_ = make_expert_executor(world, config_, options_, memory_);
  }
  ExpertRig(const ExpertRig&) = delete;
  ExpertRig& operator=(const ExpertRig&) = delete;
  ~ExpertRig() {
    defer_windows();
    world_.transport().defer_release(std::move(memory_.workspace.memory));
    world_.transport().defer_release(std::move(memory_.signals.memory));
  }

  /// One dispatch. @param earlier by its routing; null: with one of its own
  /// @param present whose copies are there already
  std::shared_ptr<const ExpertTables> dispatch(const ExpertDispatchInput& input,
                                               const Stream& stream,
                                               const ExpertTables* earlier = nullptr,
                                               const ExpertTables* present = nullptr) {
    ExpertCall call = next_call("dispatch", dispatches_++, stream);
    call.present = present;
    auto tables = earlier == nullptr ? executor_->route(call, input)
                                     : executor_->enter(call, input, *earlier);
    executor_->dispatch(call, input, *tables);
    return tables;
  }

  /// One dispatch, in windows that grow between its halves when too many rows come.
  std::shared_ptr<const ExpertTables> dispatch_growing(const ExpertDispatchInput& input,
                                                       const Stream& stream) {
    ExpertCall call = next_call("dispatch", dispatches_++, stream);
    call.may_grow = true;
    auto tables = executor_->route(call, input);
    const std::int64_t largest = std::ranges::max(tables->wait_counts());
    if (largest > memory_.capacity_rows) {
      defer_windows();
      take_windows(grown_output_rows(memory_.capacity_rows, largest));
    }
    executor_->dispatch(call, input, *tables);
    return tables;
  }

  void combine(const ExpertCombineInput& input, const ExpertTables& tables, const Stream& stream) {
    executor_->combine(next_call("combine", combines_++, stream), input, tables);
  }

  /// Where the last dispatch left its rows.
  [[nodiscard]] std::byte* window() const {
    return memory_.dispatch_windows[(dispatches_ - 1) % 2].local;
  }
  /// Where the next combine takes them from.
  [[nodiscard]] std::byte* combine_window() const {
    return memory_.combine_windows[combines_ % 2].local;
  }

  [[nodiscard]] const ExpertMemory& memory() const { return memory_; }
  [[nodiscard]] const EPConfig& config() const { return config_; }
  [[nodiscard]] const EPDispatchOptions& options() const { return options_; }
  [[nodiscard]] ExpertExecutor& executor() { return *executor_; }
  void use_sms(int num_sms) { num_sms_ = num_sms; }
  /// Calls are those of a layer whose hosts wait for counts. All ranks alike; a combine as the
  /// dispatch that made its routing.
  void know_counts(bool known) { knows_counts_ = known; }

 private:
  void take_windows(std::int64_t capacity_rows) {
    memory_.capacity_rows = capacity_rows;
    memory_.window = expert_window_layout(config_, options_, capacity_rows);
    const std::int64_t row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
    Transport& transport = world_.transport();
    for (int parity = 0; parity < 2; ++parity) {
      memory_.dispatch_windows[parity] = transport.allocate(memory_.window.total, "dispatch");
      memory_.combine_windows[parity] =
          transport.allocate(std::max<std::int64_t>(capacity_rows * row_bytes, 1), "combine");
    }
  }

  void defer_windows() {
    for (int parity = 0; parity < 2; ++parity) {
      world_.transport().defer_release(std::move(memory_.dispatch_windows[parity].memory));
      world_.transport().defer_release(std::move(memory_.combine_windows[parity].memory));
    }
  }

  ExpertCall next_call(const char* operation, std::uint64_t number, const Stream& stream) {
    return {.operation = operation,
            .memory = &memory_,
            .epoch = ++calls_,
            .parity = static_cast<std::uint32_t>(number % 2),
            .num_sms = num_sms_,
            .stream = &stream,
            .may_grow = knows_counts_,
            .sums_locally = true};
  }

  World& world_;
  EPConfig config_;
  EPDispatchOptions options_;
  int num_sms_;
  bool knows_counts_ = false;
  ExpertMemory memory_;
  std::unique_ptr<ExpertExecutor> executor_;
  std::uint64_t calls_ = 0;
  std::uint64_t dispatches_ = 0;
  std::uint64_t combines_ = 0;
};

/// The first elements of a table as numbers.
inline std::vector<std::int64_t> numbers(const DeviceArena& arena, const ConstTensorView& view,
                                         std::int64_t count) {
  std::vector<std::int32_t> raw(count);
  arena.read(raw.data(), view.data, count * 4);
  return {raw.begin(), raw.end()};
}

inline std::vector<std::int64_t> numbers(const IndexArray& array) { return array.to_vector(); }

inline std::vector<std::int64_t> numbers(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

/// What the tables of a dispatch hold is what the simulation says of `rank`.
inline void expect_tables(const DeviceArena& arena, const ExpertTableViews& got,
                          const ExpertDispatch& expected, std::int32_t rank) {
  const std::size_t r = rank;
  const EPAll2AllLayoutDesc& desc = expected.layout[r];
  const auto same = [&](const char* name, const ConstTensorView& view,
                        const std::vector<std::int64_t>& want) {
    EXPECT_EQ(numbers(arena, view, std::ssize(want)), want) << name;
  };
  same("ids", got.ids, numbers(desc.topk_indices_tensor));
  same("dst_rows", got.dst_rows, numbers(desc.token_dst_scatter_idx));
  same("num_input_tokens", got.num_input_tokens, numbers(desc.num_input_tokens_per_rank));
  same("splits", got.splits, numbers(expected.rows.splits));
  same("segment_offsets", got.segment_offsets, numbers(expected.rows.segment_offsets));
  same("expert_counts", got.expert_counts, numbers(desc.recv_expert_counts));
  same("expert_offsets", got.expert_offsets, numbers(desc.recv_expert_offsets));
  same("num_recv_rows", got.num_recv_rows, numbers(expected.rows.num_recv_rows));
  if (desc.send_reqs_recv_tensor) {
    same("send_reqs", got.send_reqs, numbers(*desc.send_reqs_recv_tensor));
  }
  if (desc.skipped_token_mapping_indices) {
    same("leader_rows", got.primary_rows, numbers(*desc.skipped_token_mapping_indices));
    same("choice_rows", got.topk_slot_rows, numbers(*desc.skipped_token_topk_mapping_indices));
  }
  if (desc.recv_topk_indices) {
    same("recv_topk", got.recv_topk, numbers(*desc.recv_topk_indices));
    same("compact_to_grouped", got.compact_to_grouped, numbers(*desc.compact_to_grouped));
    same("grouped_to_compact", got.grouped_to_compact, numbers(*desc.grouped_to_compact));
  }
  if (desc.all_slot_experts) {
    same("slot_experts", got.slot_experts, numbers(*desc.all_slot_experts));
    same("slot_quotas", got.slot_quotas, numbers(*desc.all_slot_quotas));
  }
  const auto origin = numbers(expected.recv_origin[r]);
  const auto tags = numbers(arena, got.recv_tags, std::ssize(origin) / 3 * 4);
  for (std::size_t row = 0; row < origin.size() / 3; ++row) {
    for (std::size_t i = 0; i < 3; ++i) {
      ASSERT_EQ(tags[row * 4 + i], origin[row * 3 + i]) << "tag of row " << row;
    }
  }
}

/// The last dispatch's rows, scales and weights are what the simulation says.
inline void expect_rows(const ExpertRig& rig, const DeviceArena& arena,
                        const ExpertDispatch& expected) {
  const std::size_t r = rig.config().rank;
  const ExpertWindowLayout& window = rig.memory().window;
  const auto same = [&](const char* name, std::int64_t offset, const HostTensor& want) {
    HostTensor got(want.dtype(), want.shape());
    arena.read(got.bytes().data(), rig.window() + offset, got.size_bytes());
    EXPECT_TRUE(same_bytes(got, want)) << name;
  };
  same("rows", window.rows, expected.recv_tokens[r]);
  if (!expected.recv_scales.empty()) same("scales", window.scales, expected.recv_scales[r]);
  if (!expected.recv_weights.empty()) same("weights", window.weights, expected.recv_weights[r]);
}

/// A case on a rank's device.
struct DeviceInput {
  DeviceInput(DeviceArena& arena, const ExpertCase& sample, std::int32_t rank, bool weights = true,
              std::int64_t shift = 0) {
    const std::size_t r = rank;
    input.tokens = arena.upload(sample.tokens[r], shift);
    input.ids = arena.upload(sample.ids[r]);
    if (weights && !sample.weights.empty()) input.weights = arena.upload(sample.weights[r]);
    if (!sample.scales.empty()) input.scales = arena.upload(sample.scales[r]);
    if (sample.positions) input.full_scatter_indices = arena.upload(*sample.positions);
  }
  ExpertDispatchInput input;
};

/// Rows that experts could have made: random, of the token dtype, as many as arrived.
inline std::vector<HostTensor> random_outputs(const ExpertDispatch& dispatch, Random& random) {
  std::vector<HostTensor> outputs;
  for (const HostTensor& rows : dispatch.recv_tokens) {
    const std::int64_t count = rows.shape()[0];
    HostTensor output(dispatch.config.token_dtype, {count, dispatch.config.hidden});
    for (std::int64_t i = 0; i < count * dispatch.config.hidden; ++i) {
      set_float(output, i, random.uniform_float() * 4 - 2);
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

/// One way to combine, and what comes of it.
struct CombineCase {
  std::string name;
  EPCombineOptions options;
  std::vector<std::vector<HostTensor>> biases;
  std::vector<HostTensor> expected;
};

inline std::vector<CombineCase> combine_cases(const ExpertDispatch& dispatch,
                                              const std::vector<HostTensor>& outputs,
                                              Random& random) {
  const bool grouped = dispatch.options.rows == EPRows::grouped;
  std::vector<CombineCase> cases;
  cases.push_back({"plain", {}, {}, {}});
  if (grouped) cases.push_back({"local", {.local_combine = true}, {}, {}});
  if (grouped && !dispatch.source_weights.empty()) {
    cases.push_back({"weighted", {.weighted = true}, {}, {}});
    cases.push_back({"local, weighted", {.local_combine = true, .weighted = true}, {}, {}});
  }
  for (const std::size_t num_biases : {std::size_t{1}, std::size_t{2}}) {
    CombineCase with{concat(num_biases, " biases"), {}, {}, {}};
    for (std::size_t b = 0; b < num_biases; ++b) {
      std::vector<HostTensor> bias;
      for (const auto& ids : dispatch.ids) {
        const std::int64_t tokens = std::ssize(ids) / dispatch.config.topk;
        HostTensor values(dispatch.config.token_dtype, {tokens, dispatch.config.hidden});
        for (std::int64_t i = 0; i < tokens * dispatch.config.hidden; ++i) {
          set_float(values, i, random.uniform_float() - 0.5F);
        }
        bias.push_back(std::move(values));
      }
      with.biases.push_back(std::move(bias));
    }
    cases.push_back(std::move(with));
  }
  const auto output_views = views_of(outputs);
  for (CombineCase& sample : cases) {
    std::vector<std::vector<ConstTensorView>> views;
    for (const auto& bias : sample.biases) views.push_back(views_of(bias));
    const std::vector<std::span<const ConstTensorView>> biases(views.begin(), views.end());
    sample.expected = simulate_expert_combine(dispatch, output_views, sample.options, biases);
  }
  return cases;
}

/// Combines on a rank, and compares. @param staged the outputs are in the window already
inline void expect_combine(ExpertRig& rig, DeviceArena& arena, const ExpertTables& tables,
                           const CombineCase& sample, const HostTensor& outputs, bool staged) {
  const std::size_t r = rig.config().rank;
  const Stream stream{arena.stream()};
  ExpertCombineInput input;
  if (staged) {
    input.rows = ConstTensorView(rig.combine_window(), outputs.dtype(), outputs.shape());
    arena.copy(rig.combine_window(), outputs.bytes().data(), outputs.size_bytes());
    arena.synchronize();
  } else {
    input.rows = arena.upload(outputs);
  }
  std::vector<ConstTensorView> biases;
  for (const auto& bias : sample.biases) biases.push_back(arena.upload(bias[r]));
  input.options = sample.options;
  input.biases = biases;
  input.output = arena.take(sample.expected[r].dtype(), sample.expected[r].shape());
  rig.combine(input, tables, stream);
  EXPECT_TRUE(same_bytes(arena.download(input.output), sample.expected[r]))
      << sample.name << (staged ? ", staged" : "");
  EXPECT_TRUE(arena.guards_hold(input.output)) << sample.name;
}

}  // namespace waybill::test
