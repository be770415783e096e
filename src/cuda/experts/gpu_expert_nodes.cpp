#include "gpu_expert_nodes.h"

#include <algorithm>
#include <span>
#include <utility>

#include "../rank/cuda_check.h"
#include "core/memory_layout.h"
#include "core/to_size.h"
#include "expert_launch.h"
#include "nodes_launch.h"
#include "runtime/executor.h"
#include "schedule/workspace_phase.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

using waybill::detail::to_size;

static_assert(static_cast<int>(ExpertSignal::entered) == 0);  // see list_puts_kernel

/// Puts of one network path, at most: a row and its scales each, or whole parts.
std::int64_t most_puts(const EPConfig& config) {
  const std::int64_t whole = 2 + config.max_tokens * config.topk * 8 / max_put_bytes;
  return (config.num_nodes() - 1) * (max_node_parts * config.max_tokens + whole);
}

}  // namespace

ExpertNodes::ExpertNodes(Transport& transport, std::shared_ptr<GpuRank> gpu, NetworkPath& path,
                         const EPConfig& config, const EPDispatchOptions& options,
                         const ExpertMemory& memory, const ExpertParams& params)
    : transport_(transport),
      gpu_(std::move(gpu)),
      path_(path),
      config_(config),
      options_(options),
      memory_(memory),
      params_(params),
      own_node_(config.rank / config.local_world_size) {
  cuda_check(prepare_nodes(config_.token_dtype), "loading kernels");
  const std::int64_t steps = config_.num_nodes() - 1;
  waybill::detail::MemoryLayout parts;
  const std::int64_t puts = parts.take(most_puts(config_) * std::int64_t{sizeof(NetworkPut)});
  const std::int64_t step_table = parts.take(steps * std::int64_t{sizeof(NetworkStep)});
  const std::int64_t waits = parts.take(steps * std::int64_t{sizeof(BatchSlot)});
  const std::int64_t signals = parts.take(steps * std::int64_t{sizeof(BatchSlot)});
  const std::int64_t done = parts.take(steps * std::int64_t{sizeof(unsigned)});
  const std::int64_t state = parts.take(sizeof(PathState));
  const std::int64_t num_puts = parts.take(sizeof(std::int32_t));
  program_memory_ = device_memory(parts.total(), gpu_->stream());
  auto* const base = static_cast<std::byte*>(program_memory_.get());
  program_ = {reinterpret_cast<PathState*>(base + state),
              reinterpret_cast<std::int32_t*>(base + num_puts),
              reinterpret_cast<NetworkStep*>(base + step_table),
              reinterpret_cast<NetworkPut*>(base + puts),
              reinterpret_cast<BatchSlot*>(base + waits),
              reinterpret_cast<BatchSlot*>(base + signals)};
  done_ = reinterpret_cast<unsigned*>(base + done);
}

ExpertNodes::~ExpertNodes() { transport_.defer_release({program_memory_}); }

int ExpertNodes::path_sms(int num_sms) { return std::clamp(num_sms / 4, 1, 8); }

std::byte* ExpertNodes::own_rows() const {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(payload_dtype(config_, options_));
  return memory_.workspace.local + memory_.workspace_layout.forward_rows + own_slice() * row_bytes;
}

std::byte* ExpertNodes::own_scales() const {
  return memory_.workspace.local + memory_.workspace_layout.forward_scales +
         own_slice() * num_scales(config_, options_) * 4;
}

ListPutsParams ExpertNodes::puts(const ExpertCall& call, const GpuExpertRouting& routing,
                                 FaultKind kind, ExpertSignal signal) const {
  ListPutsParams params{};
  params.m = params_.arrive(call, kind);
  params.shape = params_.shape(routing);
  params.begins = -1;
  params.filter = NodeFilter::all;
  params.first_signal = static_cast<std::int32_t>(first_slot(signal));
  params.out = program_;
  return params;
}

/// This rank's slice of a part of the workspace, to the same slice of the others.
void ExpertNodes::add_part(ListPutsParams& params, std::int64_t part,
                           std::int64_t row_bytes) const {
  if (row_bytes == 0) return;
  const std::int64_t slice = part + own_slice() * row_bytes;
  params.parts[params.num_parts++] = {.from = slice,
                                      .from_node_bytes = 0,
                                      .to = slice,
                                      .row_bytes = row_bytes,
                                      .total_bytes = params.shape.num_tokens * row_bytes};
}

void ExpertNodes::copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
                       const ExpertCall& call) const {
  const std::int64_t bytes = from.shape[0] * row_bytes;
  if (bytes == 0 || from.data == nullptr || from.data == to) return;
  gpu_->check(
      cudaMemcpyAsync(to, from.data, to_size(bytes), cudaMemcpyDeviceToDevice, stream_of(call)),
      "copying to the workspace", call.operation);
}

void ExpertNodes::add_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                              ListPutsParams& params) const {
  if (!is_given(input.weights)) return;
  const std::int64_t row_bytes = config_.topk * dtype_bytes(config_.weight_dtype);
  copy(memory_.workspace.local + memory_.workspace_layout.forward_weights + own_slice() * row_bytes,
       input.weights, row_bytes, call);
  add_part(params, memory_.workspace_layout.forward_weights, row_bytes);
}

NetworkPhase ExpertNodes::whole_parts(const ListPutsParams& params) const {
  WorkspacePart parts[max_node_parts];
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const NodePart& part = params.parts[i];
    const std::int64_t slice_bytes = config_.max_tokens * part.row_bytes;
    parts[i] = {part.from, part.from_node_bytes, part.to - own_node_ * slice_bytes, slice_bytes};
  }
  return workspace_phase(transport_.topology(), config_.rank,
                         std::span(parts, to_size(params.num_parts)), params.first_signal,
                         params.begins >= 0);
}

void ExpertNodes::start(const ListPutsParams& params, const ExpertCall& call, int num_sms) {
  const cudaStream_t stream = stream_of(call);
  ListPutsParams listed = params;
  if (path_.needs_phases()) {
    phase_ = whole_parts(params);
    listed.num_parts = 0;
  }
  gpu_->check(launch_list_puts(listed, stream), "launching a kernel", call.operation);
  path_.start({.operation = call.operation,
               .kind = params.m.arrive.kind,
               .arrival = params.begins >= 0 ? PathArrival::first : PathArrival::none,
               .tables = {.num_puts = program_.num_puts,
                          .steps = program_.steps,
                          .puts = program_.puts,
                          .waits = program_.waits,
                          .signals = program_.signals,
                          .done = done_,
                          .ready = nullptr},
               .state = program_.state,
               .phases = std::span(&phase_, 1),
               .window = &memory_.workspace,
               .slots = &memory_.signals,
               .first_slot = 0,
               .arrivals = &memory_.signals,
               .fingerprint = params.m.arrive.fingerprint,
               .epoch = call.epoch,
               .num_sms = num_sms,
               .stream = stream});
}

/// Joins the network path, and waits for what the other nodes have sent with theirs.
void ExpertNodes::wait_until(const ListPutsParams& params, const ExpertCall& call, bool counts) {
  const cudaStream_t stream = stream_of(call);
  path_.join(stream);
  WaitNodesParams wait{};
  wait.m = params.m;
  wait.shape = params.shape;
  wait.begins = params.begins;
  wait.counts = counts;
  if (params.num_parts > 0) wait.slots = memory_.signals.local + params.first_signal;
  gpu_->check(launch_wait_nodes(wait, stream), "launching a kernel", call.operation);
}

void ExpertNodes::arrive(const ExpertCall& call, const GpuExpertRouting& routing, int num_sms) {
  ListPutsParams params = puts(call, routing, FaultKind::moe_combine, ExpertSignal::shared);
  params.begins = 1;
  start(params, call, num_sms);
  wait_until(params, call, true);
}

void ExpertNodes::exchange_ids(const ExpertCall& call, const ExpertDispatchInput& input,
                               const GpuExpertRouting& routing, int num_sms) {
  ListPutsParams params = puts(call, routing, FaultKind::moe_dispatch, ExpertSignal::posted);
  const std::int64_t row_bytes = std::int64_t{config_.topk} * 4;
  NodeIdsParams ids{};
  ids.shape = params.shape;
  ids.ids = input.ids.data;
  ids.wide_ids = input.ids.dtype == DType::int64;
  ids.dropped_id = options_.dropped(config_);
  ids.out = reinterpret_cast<std::int32_t*>(
      memory_.workspace.local + memory_.workspace_layout.forward_ids + own_slice() * row_bytes);
  ids.sink = params.m.arrive.sink;
  ids.state = params.m.state;
  gpu_->check(launch_node_ids(ids, num_sms, stream_of(call)), "launching a kernel", call.operation);
  params.begins = 0;
  add_part(params, memory_.workspace_layout.forward_ids, row_bytes);
  params.parts[0].total_bytes = config_.max_tokens * row_bytes;  // with what says: no token
  add_weights(call, input, params);
  start(params, call, num_sms);
  wait_until(params, call, false);
}

void ExpertNodes::exchange_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                                   const GpuExpertRouting& routing, int num_sms) {
  ListPutsParams params = puts(call, routing, FaultKind::moe_dispatch, ExpertSignal::posted);
  params.begins = 0;
  add_weights(call, input, params);
  start(params, call, num_sms);
  wait_until(params, call, false);
}

void ExpertNodes::note_runs(const ExpertCall& call, GpuExpertRouting& made) const {
  NodeRunsParams params{};
  params.shape = params_.shape(made);
  params.ids = made.part(made.fixed().ids);
  params.runs = made.part(made.fixed().send_reqs);
  gpu_->check(launch_node_runs(params, stream_of(call)), "launching a kernel", call.operation);
}

void ExpertNodes::start_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                             const GpuExpertRouting& routing, int num_sms) {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(payload_dtype(config_, options_));
  const std::int64_t scale_bytes = num_scales(config_, options_) * 4;
  if (options_.payload != EPPayload::quantized) {  // else they are there
    copy(own_rows(), input.tokens, row_bytes, call);
    if (scale_bytes > 0) copy(own_scales(), input.scales, scale_bytes, call);
  }
  ListPutsParams params = puts(call, routing, FaultKind::moe_dispatch, ExpertSignal::forwarded);
  params.filter = NodeFilter::tokens;
  params.ids = routing.part(routing.fixed().ids) + own_slice() * config_.topk;
  add_part(params, memory_.workspace_layout.forward_rows, row_bytes);
  add_part(params, memory_.workspace_layout.forward_scales, scale_bytes);
  start(params, call, num_sms);
}

void ExpertNodes::finish_rows(const ExpertCall& call) { path_.join(stream_of(call)); }

/// What start_shares sends.
ListPutsParams ExpertNodes::partial_sum_puts(const ExpertCall& call,
                                             const GpuExpertRouting& routing) const {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  const std::int64_t slice_bytes = config_.max_tokens * row_bytes;
  const ExpertWorkspaceLayout& workspace = memory_.workspace_layout;
  ListPutsParams params = puts(call, routing, FaultKind::moe_combine, ExpertSignal::shared);
  params.filter = NodeFilter::partial_sums;
  params.ids = routing.part(routing.fixed().ids);
  params.num_parts = 1;
  params.parts[0] = {.from = workspace.sums,
                     .from_node_bytes = slice_bytes,
                     .to = workspace.partial_sums + own_node_ * slice_bytes,
                     .row_bytes = row_bytes,
                     .total_bytes = slice_bytes};
  return params;
}

void ExpertNodes::start_partial_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                     int num_sms) {
  start(partial_sum_puts(call, routing), call, num_sms);
}

void ExpertNodes::add_partial_sums(const ExpertCall& call, const ExpertCombineInput& input,
                                   const GpuExpertRouting& routing) {
  const ListPutsParams params = partial_sum_puts(call, routing);
  const std::int64_t row_bytes = params.parts[0].row_bytes;
  const std::int64_t slice_bytes = params.parts[0].total_bytes;
  wait_until(params, call, false);
  AddPartialSumsParams add{};
  add.shape = params.shape;
  add.row_bytes = row_bytes;
  add.ids = params.ids + own_slice() * config_.topk;
  add.partial_sums = memory_.workspace.local + memory_.workspace_layout.partial_sums;
  add.own_share = sums() + own_node_ * slice_bytes;
  for (std::size_t i = 0; i < input.biases.size(); ++i) add.biases[i] = input.biases[i].data;
  add.output = input.output.data;
  const bool wide = common_word({row_bytes, address_of(add.output), address_of(add.biases[0]),
                                 address_of(add.biases[1])}) == 16;
  gpu_->check(
      launch_add_partial_sums(add, config_.token_dtype, wide, 2 * gpu_->num_sms(), stream_of(call)),
      "launching a kernel", call.operation);
}

}  // namespace waybill::cuda
