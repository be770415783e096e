#include "gpu_expert_nodes.h"

#include <utility>

#include "../moe/launch.h"
#include "../moe/nodes_launch.h"
#include "cuda_check.h"
#include "waybill/core/at.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {
namespace {

using waybill::detail::at;

cudaStream_t stream_of(const ExpertCall& call) {
  return call.stream == nullptr ? nullptr : static_cast<cudaStream_t>(call.stream->handle);
}

constexpr std::int64_t chunk_bytes = 2048;  // of what goes whole, for one warp

}  // namespace

ExpertNodes::ExpertNodes(Transport& transport, std::shared_ptr<GpuRank> gpu, const EPConfig& config,
                         const EPDispatchOptions& options, const ExpertMemory& memory,
                         const ExpertParams& params)
    : transport_(transport),
      gpu_(std::move(gpu)),
      config_(config),
      options_(options),
      memory_(memory),
      params_(params),
      own_node_(config.rank / config.local_world_size) {
  cuda_check(prepare_nodes(config_.token_dtype), "loading kernels");
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  sums_ = transport_.allocate(config_.num_nodes() * config_.max_tokens * row_bytes, "node sums");
  posted_ = transport_.allocate_signals(config_.world_size, "node ids");
}

ExpertNodes::~ExpertNodes() {
  transport_.abandon(std::move(sums_.memory));
  transport_.abandon(std::move(posted_.memory));
}

std::byte* ExpertNodes::own_rows() const {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(payload_dtype(config_, options_));
  return memory_.board.local + memory_.board_layout.forward_rows + own_slice() * row_bytes;
}

std::byte* ExpertNodes::own_scales() const {
  return memory_.board.local + memory_.board_layout.forward_scales +
         own_slice() * num_scales(config_, options_) * 4;
}

ExchangeParams ExpertNodes::exchange(const ExpertCall& call, const GpuExpertTables& tables,
                                     FaultKind kind) const {
  ExchangeParams params{};
  params.m = params_.meet(call, kind);
  params.shape = params_.shape(tables);
  params.filter = NodeFilter::all;
  return params;
}

/// This rank's slice of a part of the board, to the same slice of the others.
void ExpertNodes::add_array(ExchangeParams& params, std::int64_t part,
                            std::int64_t row_bytes) const {
  if (row_bytes == 0) return;
  NodeArray& array = params.arrays[params.num_arrays++];
  array.to = part + own_slice() * row_bytes;
  array.from = memory_.board.local + array.to;
  array.total_bytes = params.shape.num_tokens * row_bytes;
  array.row_bytes = params.filter == NodeFilter::all ? chunk_bytes : row_bytes;
  array.word_bytes = common_word({array.to, array.total_bytes, array.row_bytes});
}

void ExpertNodes::copy(std::byte* to, const ConstTensorView& from, std::int64_t row_bytes,
                       const ExpertCall& call) const {
  const std::int64_t bytes = from.shape[0] * row_bytes;
  if (bytes == 0 || from.data == nullptr || from.data == to) return;
  gpu_->check(cudaMemcpyAsync(to, from.data, at(bytes), cudaMemcpyDeviceToDevice, stream_of(call)),
              "copying to the board", call.operation);
}

void ExpertNodes::add_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                              ExchangeParams& params) const {
  if (!is_given(input.weights)) return;
  const std::int64_t row_bytes = config_.topk * dtype_bytes(config_.weight_dtype);
  copy(memory_.board.local + memory_.board_layout.forward_weights + own_slice() * row_bytes,
       input.weights, row_bytes, call);
  add_array(params, memory_.board_layout.forward_weights, row_bytes);
}

void ExpertNodes::run(const ExchangeParams& params, const std::uint64_t* signals,
                      const ExpertCall& call, int num_sms) const {
  PeerWire wire{};
  const std::int64_t first = params.own_signals - signals;
  const SignalPad& pad = signals == posted_.local ? posted_ : memory_.signals;
  for (std::int32_t node = 0; node < config_.num_nodes(); ++node) {
    const auto peer = at(node * config_.local_world_size + config_.rank % config_.local_world_size);
    wire.boards[node] = static_cast<std::byte*>(memory_.board.memory[peer].get());
    wire.signals[node] = static_cast<std::uint64_t*>(pad.memory[peer].get()) + first;
  }
  gpu_->check(launch_exchange(params, wire, num_sms, stream_of(call)), "launching a kernel",
              call.operation);
}

void ExpertNodes::meet(const ExpertCall& call) const {
  gpu_->check(launch_meet_nodes(params_.meet(call, FaultKind::moe_combine), 1, stream_of(call)),
              "launching a kernel", call.operation);
}

void ExpertNodes::exchange_ids(const ExpertCall& call, const ExpertDispatchInput& input,
                               const GpuExpertTables& tables, int num_sms) const {
  ExchangeParams params = exchange(call, tables, FaultKind::moe_dispatch);
  const ExpertBoardLayout& board = memory_.board_layout;
  const std::int64_t row_bytes = std::int64_t{config_.topk} * 4;
  NodeIdsParams ids{};
  ids.shape = params.shape;
  ids.ids = input.ids.data;
  ids.wide_ids = input.ids.dtype == DType::int64;
  ids.dropped_id = options_.dropped(config_);
  ids.out = reinterpret_cast<std::int32_t*>(memory_.board.local + board.forward_ids +
                                            own_slice() * row_bytes);
  ids.faults = params_.faults();
  gpu_->check(launch_node_ids(ids, num_sms, stream_of(call)), "launching a kernel", call.operation);
  gpu_->check(launch_meet_nodes(params.m, 0, stream_of(call)), "launching a kernel",
              call.operation);
  params.is_first = true;
  add_array(params, board.forward_ids, row_bytes);
  params.arrays[0].total_bytes = config_.max_tokens * row_bytes;
  params.arrays[0].word_bytes = common_word({params.arrays[0].to, config_.max_tokens * row_bytes});
  add_weights(call, input, params);
  params.own_signals = posted_.local;
  run(params, posted_.local, call, num_sms);
}

void ExpertNodes::exchange_weights(const ExpertCall& call, const ExpertDispatchInput& input,
                                   const GpuExpertTables& tables, int num_sms) const {
  ExchangeParams params = exchange(call, tables, FaultKind::moe_dispatch);
  gpu_->check(launch_meet_nodes(params.m, 0, stream_of(call)), "launching a kernel",
              call.operation);
  if (!is_given(input.weights)) return;
  params.is_first = true;
  add_weights(call, input, params);
  params.own_signals = posted_.local;
  run(params, posted_.local, call, num_sms);
}

void ExpertNodes::note_runs(const ExpertCall& call, const GpuExpertTables& tables) const {
  NodeRunsParams params{};
  params.shape = params_.shape(tables);
  params.ids = tables.part(tables.fixed().ids);
  params.runs = tables.part(tables.fixed().send_reqs);
  gpu_->check(launch_node_runs(params, stream_of(call)), "launching a kernel", call.operation);
}

void ExpertNodes::exchange_rows(const ExpertCall& call, const ExpertDispatchInput& input,
                                const GpuExpertTables& tables, int num_sms) const {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(payload_dtype(config_, options_));
  const std::int64_t scale_bytes = num_scales(config_, options_) * 4;
  if (options_.payload != EPPayload::quantized) {  // else it is there
    copy(own_rows(), input.tokens, row_bytes, call);
    if (scale_bytes > 0) copy(own_scales(), input.scales, scale_bytes, call);
  }
  ExchangeParams params = exchange(call, tables, FaultKind::moe_dispatch);
  params.filter = NodeFilter::tokens;
  params.ids = tables.part(tables.fixed().ids) + own_slice() * config_.topk;
  add_array(params, memory_.board_layout.forward_rows, row_bytes);
  add_array(params, memory_.board_layout.forward_scales, scale_bytes);
  const auto first = static_cast<std::int64_t>(ExpertSignal::forwarded) * config_.world_size;
  params.own_signals = memory_.signals.local + first;
  run(params, memory_.signals.local, call, num_sms);
}

void ExpertNodes::add_shares(const ExpertCall& call, const ExpertCombineInput& input,
                             const GpuExpertTables& tables, int num_sms) const {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  const std::int64_t slice_bytes = config_.max_tokens * row_bytes;
  const std::int64_t shares = memory_.board_layout.shares;
  ExchangeParams params = exchange(call, tables, FaultKind::moe_combine);
  params.filter = NodeFilter::shares;
  params.ids = tables.part(tables.fixed().ids);
  params.num_arrays = 1;
  params.arrays[0] = {.from = sums_.local,
                      .from_node_bytes = slice_bytes,
                      .to = shares + own_node_ * slice_bytes,
                      .row_bytes = row_bytes,
                      .total_bytes = slice_bytes,
                      .word_bytes = common_word({row_bytes})};
  const auto first = static_cast<std::int64_t>(ExpertSignal::shared) * config_.world_size;
  params.own_signals = memory_.signals.local + first;
  run(params, memory_.signals.local, call, num_sms);
  AddSharesParams add{};
  add.shape = params.shape;
  add.row_bytes = row_bytes;
  add.ids = tables.part(tables.fixed().ids) + own_slice() * config_.topk;
  add.shares = memory_.board.local + shares;
  add.own_share = sums_.local + own_node_ * slice_bytes;
  for (std::size_t i = 0; i < input.biases.size(); ++i) add.biases[i] = input.biases[i].data;
  add.output = input.output.data;
  const bool wide = common_word({row_bytes, address_of(add.output), address_of(add.biases[0]),
                                 address_of(add.biases[1])}) == 16;
  gpu_->check(
      launch_add_shares(add, config_.token_dtype, wide, 2 * gpu_->num_sms(), stream_of(call)),
      "launching a kernel", call.operation);
}

}  // namespace waybill::cuda
