#include "host_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/fingerprint.h"
#include "waybill/core/error.h"
#include "waybill/runtime/world.h"

namespace waybill::detail {
namespace {

ConstTensorView table(const std::vector<std::int32_t>& values, Shape shape) {
  return {values.data(), DType::int32, shape};
}

FingerprintExchange exchange_of(const HostExpertCall& at) {
  return {at.transport,      at.memory.signals, num_layer_signals(at.config.world_size),
          at.call.operation, at.call.epoch,     at.call.fingerprint};
}

}  // namespace

ExpertTableViews HostExpertRouting::views() const {
  const std::int64_t world = config_.world_size;
  const std::int64_t experts = config_.num_experts_per_rank();
  const std::int64_t topk = config_.topk;
  const std::int64_t received = std::ssize(tags);
  ExpertTableViews views;
  views.ids = table(ids, shape_by_id());
  views.dst_rows = table(dst_rows, {config_.num_nodes(), config_.max_tokens, topk});
  views.num_input_tokens = table(rows->num_input_tokens, {world});
  views.splits = table(rows->splits, {world, config_.num_experts + 1});
  views.segment_offsets = table(rows->segment_offsets, {world, experts, world});
  views.expert_counts = {
      rows->expert_counts.data() + config_.rank * experts, DType::int32, {experts}};
  views.expert_offsets = {
      rows->expert_offsets.data() + config_.rank * (experts + 1), DType::int32, {experts + 1}};
  views.num_recv_rows = table(rows->num_recv_rows, {world});
  views.required_rows = {&required_rows, DType::int32, {1}};
  views.primary_rows = table(primary_rows, {received});
  views.topk_slot_rows = table(topk_slot_rows, {received, topk});
  views.send_reqs = table(send_reqs, {config_.num_nodes(), 2, config_.max_tokens});
  views.recv_topk = table(recv_topk, {received, topk});
  views.compact_to_grouped = table(compact_to_grouped, {received, topk});
  views.grouped_to_compact = table(grouped_to_compact, {std::ssize(grouped_to_compact)});
  views.recv_tags = {tags.data(), DType::int32, {received, 4}};
  if (slots != nullptr) {
    views.slot_experts = table(slots->plan.slots, {world, experts});
    views.slot_quotas = table(slot_quotas, {world, experts});
  }
  return views;
}

Shape HostExpertRouting::shape_by_id() const {
  if (!config_.is_intra_node()) return {config_.num_nodes(), config_.max_tokens, config_.topk};
  return {rows->num_input_tokens[config_.rank], config_.topk};
}

std::span<std::int32_t> HostExpertRouting::ids_of(std::int32_t node) {
  return std::span(ids).subspan(first_entry(node),
                                std::int64_t{rows->num_input_tokens[peer(node)]} * config_.topk);
}

std::span<std::int32_t> HostExpertRouting::dst_rows_of(std::int32_t node) {
  return std::span(dst_rows).subspan(
      node * config_.max_tokens * config_.topk,
      std::int64_t{rows->num_input_tokens[peer(node)]} * config_.topk);
}

std::span<const std::int32_t> HostExpertRouting::ids_of(std::int32_t node) const {
  return const_cast<HostExpertRouting*>(this)->ids_of(node);  // NOLINT: it only looks
}

std::span<const std::int32_t> HostExpertRouting::dst_rows_of(std::int32_t node) const {
  return const_cast<HostExpertRouting*>(this)->dst_rows_of(node);  // NOLINT: it only looks
}

std::int64_t HostExpertRouting::num_rows(std::int64_t capacity_rows) const {
  return std::min<std::int64_t>(rows->num_recv_rows[config_.rank], capacity_rows);
}

void HostExpertRouting::read_tags(std::span<const RowTag> received) {
  const std::int64_t topk = config_.topk;
  tags.assign(received.begin(), received.end());
  primary_rows.assign(tags.size(), -1);
  topk_slot_rows.assign(tags.size() * topk, -1);
  for (std::size_t row = 0; row < tags.size(); ++row) {
    const RowTag& tag = tags[row];
    if (tag.source_rank < 0) continue;
    primary_rows[row] = tag.primary_row;
    topk_slot_rows[tag.primary_row * topk + tag.topk_slot] = static_cast<std::int32_t>(row);
  }
}

void HostExpertRouting::read_topk(std::span<const std::int32_t> received) {
  recv_topk.assign(received.begin(), received.end());
  const std::int64_t experts = config_.num_experts_per_rank();
  const auto first = rows->expert_offsets.begin() + config_.rank * (experts + 1);
  // Compact rows are ordered by source and token, and so are the grouped rows of each expert.
  std::vector<std::int32_t> next(first, first + experts);
  compact_to_grouped.assign(recv_topk.size(), -1);
  grouped_to_compact.assign(first[experts], -1);
  for (std::int64_t entry = 0; entry < std::ssize(recv_topk); ++entry) {
    if (recv_topk[entry] < 0) continue;
    const std::int32_t grouped = next[recv_topk[entry]]++;
    compact_to_grouped[entry] = grouped;
    grouped_to_compact[grouped] = static_cast<std::int32_t>(entry / config_.topk);
  }
}

ConstTensorView HostExpertTables::weights() const {
  if (!has_weights_) return {};
  return {weights_.data(), weight_dtype_, routing_->shape_by_id()};
}

void HostExpertTables::carry_weights() {
  has_weights_ = true;
  weights_.resize(routing_->ids.size() * dtype_bytes(weight_dtype_));
}

std::byte* HostExpertTables::weights_of(std::int32_t node) {
  if (!has_weights_) return nullptr;
  return weights_.data() + routing_->first_entry(node) * dtype_bytes(weight_dtype_);
}

const std::byte* HostExpertTables::weights_of(std::int32_t node) const {
  return const_cast<HostExpertTables*>(this)->weights_of(node);  // NOLINT: it only looks
}

void HostExpertCall::wait_for(ExpertSignal kind, std::int32_t peer) const {
  exchange_of(*this).wait_for(slot(kind, peer).idx, Rank{peer});
}

void HostExpertCall::raise_and_wait(ExpertSignal kind, std::int32_t count) const {
  const std::int32_t first = config.rank / count * count;
  const auto other = [&](std::int32_t k) { return first + (config.rank - first + k) % count; };
  for (std::int32_t k = 1; k < count; ++k) raise(kind, other(k));
  for (std::int32_t k = 1; k < count; ++k) wait_for(kind, other(k));
}

void HostExpertCall::enter() const { exchange_of(*this).enter(slot(ExpertSignal::entered, 0).idx); }

namespace {

class HostExpertExecutor final : public ExpertExecutor {
 public:
  HostExpertExecutor(Transport& transport, const EPConfig& config, const EPDispatchOptions& options,
                     const ExpertMemory& memory)
      : transport_(transport),
        experts_(config),
        config_(slot_config(config, options)),
        options_(options),
        memory_(memory) {}

  std::shared_ptr<ExpertTables> route(const ExpertCall& call,
                                      const ExpertDispatchInput& input) override {
    return host_route(at(call), input);
  }

  std::shared_ptr<ExpertTables> enter(const ExpertCall& call, const ExpertDispatchInput& input,
                                      const ExpertTables& earlier) override {
    return host_enter(at(call), input, static_cast<const HostExpertTables&>(earlier));
  }

  void dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                ExpertTables& begun) override {
    auto& tables = static_cast<HostExpertTables&>(begun);
    const std::int64_t largest = tables.routing().rows->largest_recv_rows;
    if (largest > std::max(memory_.capacity_rows, overflow_.rows))
      overflow_ = {largest, call.epoch};
    host_dispatch(at(call), input, tables);
  }

  void combine(const ExpertCall& call, const ExpertCombineInput& input,
               const ExpertTables& tables) override {
    host_combine(at(call), input, static_cast<const HostExpertTables&>(tables));
  }

  void weigh_gradients(const ExpertGradientInput& input, const ExpertTables& tables,
                       const Stream& /*stream*/) override {
    detail::weigh_gradients(input, num_rows(tables, input.gradients));
  }

  void copy_rows(const ConstTensorView& from, const TensorView& to, const ExpertTables& tables,
                 const Stream& /*stream*/) override {
    const std::int64_t row_bytes = config_.hidden * dtype_bytes(from.dtype);
    const std::int64_t bytes = num_rows(tables, from) * row_bytes;
    if (bytes > 0) std::memcpy(to.data, from.data, bytes);
  }

  void barrier(const SignalPad& signals, bool of_world, std::uint64_t epoch,
               const Stream& /*stream*/) override {
    const std::int32_t count = of_world ? config_.world_size : config_.local_world_size;
    const std::int32_t first = config_.rank / count * count;
    const std::int64_t slot = of_world ? config_.world_size : first;
    wait_for_ranks(transport_, signals, slot, first, count, epoch, "ep_barrier_all");
  }

  ExpertOverflow take_overflow() override { return std::exchange(overflow_, {}); }

 private:
  [[nodiscard]] HostExpertCall at(const ExpertCall& call) const {
    return {transport_, config_, experts_, options_, memory_, call};
  }

  /// The rows of a tensor that have arrived.
  [[nodiscard]] std::int64_t num_rows(const ExpertTables& tables,
                                      const ConstTensorView& tensor) const {
    const std::int32_t arrived = tables.routing().known_counts()[std::int64_t{config_.rank}];
    return std::min<std::int64_t>(arrived, tensor.shape[0]);
  }

  Transport& transport_;
  EPConfig experts_;
  EPConfig config_;  ///< slot_config
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  ExpertOverflow overflow_;
};

}  // namespace

}  // namespace waybill::detail

namespace waybill {

void wait_for_ranks(Transport& transport, const SignalPad& signals, std::int64_t first_slot,
                    std::int32_t first, std::int32_t count, std::uint64_t epoch,
                    std::string_view operation) {
  const std::int32_t mine = to_int(transport.rank()) - first;
  for (std::int32_t k = 1; k < count; ++k) {
    transport.signal(Rank{first + (mine + k) % count}, {&signals, first_slot + mine}, epoch);
  }
  for (std::int32_t k = 1; k < count; ++k) {
    const std::int32_t peer = (mine + k) % count;
    (void)transport.wait({&signals, first_slot + peer}, epoch, Rank{first + peer}, operation);
  }
}

std::unique_ptr<ExpertExecutor> make_expert_executor(const World& world, const EPConfig& config,
                                                     const EPDispatchOptions& options,
                                                     const ExpertMemory& memory) {
  if (auto* const factory = dynamic_cast<ExpertExecutorFactory*>(&world.executor())) {
    return factory->make_expert_executor(config, options, memory);
  }
  return std::make_unique<detail::HostExpertExecutor>(world.transport(), config, options, memory);
}

}  // namespace waybill
