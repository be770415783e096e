#include "node_slices.h"

#include <algorithm>
#include <utility>

#include "../rank/cuda_check.h"
#include "runtime/executor.h"

namespace waybill::cuda {

NodeSlices::NodeSlices(std::shared_ptr<GpuRank> gpu, int share, const EPConfig& config,
                       const EPDispatchOptions& options, const ExpertMemory& memory,
                       const ExpertParams& params)
    : gpu_(std::move(gpu)),
      share_(share),
      config_(config),
      options_(options),
      memory_(memory),
      params_(params),
      sum_bytes_(config.hidden * dtype_bytes(config.token_dtype)),
      token_bytes_(payload_row_bytes(config, options)),
      scale_bytes_(scale_row_bytes(config, options)) {
  cuda_check(prepare_node_rows(), "loading kernels");
}

bool NodeSlices::fit() const { return token_bytes_ + scale_bytes_ <= sum_bytes_; }

void NodeSlices::count(const ExpertCall& call, GpuExpertRouting& made) const {
  made.expect_node_rows();
  NodeRowsParams params{};
  params.shape = params_.shape(made);
  params.ids = reinterpret_cast<const std::int32_t*>(memory_.workspace.local +
                                                     memory_.workspace_layout.forward_ids);
  params.tokens = made.part(made.fixed().node_tokens);
  params.counts = made.part(made.fixed().node_counts);
  params.host = made.node_counts();
  params.ticket = made.ticket();
  gpu_->check(launch_node_rows(params, stream_of(call)), "launching a kernel", call.operation);
}

MoveNodeRowsParams NodeSlices::rows_of(const GpuExpertRouting& routing, Way way) const {
  const std::int64_t nodes = way == Way::there ? 0 : config_.num_nodes();
  MoveNodeRowsParams params{};
  params.shape = params_.shape(routing);
  params.tokens = routing.part(routing.fixed().node_tokens) + nodes * config_.max_tokens;
  params.counts = routing.part(routing.fixed().node_counts) + nodes;
  return params;
}

/// Nothing runs beside them.
int NodeSlices::pack_blocks() const { return std::max(1, 2 * gpu_->num_sms() / share_); }

void NodeSlices::move(const MoveNodeRowsParams& params, int blocks, cudaStream_t stream,
                      const char* operation) const {
  const int word = common_word({address_of(params.from), params.from_node_bytes,
                                address_of(params.to), params.to_node_bytes, params.row_bytes});
  gpu_->check(launch_move_node_rows(params, word, blocks, stream), "launching a kernel", operation);
}

/// From the own slice into the sums to send, and from the sums of other nodes to where rows wait to
/// be forwarded.
NodeSlices::Phase NodeSlices::pack_tokens(const ExpertCall& call, const GpuExpertRouting& routing,
                                          int path_sms) const {
  const ExpertWorkspaceLayout& layout = memory_.workspace_layout;
  std::byte* const base = memory_.workspace.local;
  const std::int64_t slice = config_.max_tokens * sum_bytes_;
  const std::int64_t own_slice =
      std::int64_t{config_.rank / config_.local_world_size} * config_.max_tokens;
  const int blocks = pack_blocks();
  Phase phase{.rows = routing.wait_node_rows(), .parts = {}, .unpack = {}};
  std::vector<MoveNodeRowsParams> unpacks;
  const auto add = [&](std::int64_t part, std::int64_t row_bytes, std::int64_t staged) {
    MoveNodeRowsParams pack = rows_of(routing, Way::there);
    pack.packs = true;
    pack.from = base + part + own_slice * row_bytes;
    pack.to = base + layout.sums + staged;
    pack.to_node_bytes = slice;
    pack.row_bytes = row_bytes;
    move(pack, blocks, stream_of(call), call.operation);
    MoveNodeRowsParams unpack = rows_of(routing, Way::back);
    unpack.from = base + layout.partial_sums + staged;
    unpack.from_node_bytes = slice;
    unpack.to = base + part;
    unpack.to_node_bytes = config_.max_tokens * row_bytes;
    unpack.row_bytes = row_bytes;
    unpacks.push_back(unpack);
    phase.parts.push_back({.from_bytes = layout.sums + staged,
                           .from_node_bytes = slice,
                           .to_bytes = layout.partial_sums + staged,
                           .to_node_bytes = slice,
                           .row_bytes = row_bytes});
  };
  add(layout.forward_rows, token_bytes_, 0);
  if (scale_bytes_ > 0) add(layout.forward_scales, scale_bytes_, config_.max_tokens * token_bytes_);
  phase.unpack = [this, unpacks, path_sms, operation = call.operation](cudaStream_t stream) {
    for (const MoveNodeRowsParams& unpack : unpacks) move(unpack, path_sms, stream, operation);
  };
  return phase;
}

/// From the sums for other nodes into where those of other nodes will be, and from there when they
/// have been sent.
NodeSlices::Phase NodeSlices::pack_sums(const ExpertCall& call, const GpuExpertRouting& routing,
                                        int path_sms) const {
  const ExpertWorkspaceLayout& layout = memory_.workspace_layout;
  std::byte* const base = memory_.workspace.local;
  const std::int64_t slice = config_.max_tokens * sum_bytes_;
  const auto between = [&](Way way, std::int64_t from, std::int64_t to) {
    MoveNodeRowsParams params = rows_of(routing, way);
    params.packs = way == Way::back;
    params.from = base + from;
    params.from_node_bytes = slice;
    params.to = base + to;
    params.to_node_bytes = slice;
    params.row_bytes = sum_bytes_;
    return params;
  };
  move(between(Way::back, layout.sums, layout.partial_sums), pack_blocks(), stream_of(call),
       call.operation);
  const MoveNodeRowsParams unpack = between(Way::there, layout.sums, layout.partial_sums);
  return {.rows = returned_rows(routing.wait_node_rows()),
          .parts = {{.from_bytes = layout.partial_sums,
                     .from_node_bytes = slice,
                     .to_bytes = layout.sums,
                     .to_node_bytes = slice,
                     .row_bytes = sum_bytes_}},
          .unpack = [this, unpack, path_sms, operation = call.operation](cudaStream_t stream) {
            move(unpack, path_sms, stream, operation);
          }};
}

}  // namespace waybill::cuda
