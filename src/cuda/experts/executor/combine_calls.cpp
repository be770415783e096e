#include "combine_calls.h"

#include <algorithm>
#include <utility>

#include "../launch.h"
#include "core/test_hooks.h"

namespace waybill::cuda {

GpuExpertCombine::GpuExpertCombine(const GpuExpertLayer& layer, const ExpertParams& params,
                                   ExpertNodes* nodes)
    : layer_(layer), params_(params), nodes_(nodes) {
  prepare();  // it may throw, and no symmetric memory is allocated yet
  if (layer.memory.slab_slots > 0) {
    const EPConfig& config = layer.config;
    const std::int64_t units = max_push_units(config.max_tokens, config.topk);
    flags_ = layer.transport.allocate_signals(units * config.world_size, "combine flags");
  }
}

GpuExpertCombine::~GpuExpertCombine() { layer_.transport.defer_release(std::move(flags_.memory)); }

void GpuExpertCombine::prepare() const {
  for (const bool bulk : {false, true}) {
    if (bulk && !layer_.gpu->has_bulk_copies()) continue;
    cuda_check(prepare_combine(layer_.config.token_dtype, layer_.config.weight_dtype, bulk),
               "loading kernels");
  }
  if (layer_.memory.slab_slots == 0) return;
  for (const PushWay way : {PushWay::elements, PushWay::words, PushWay::bulk}) {
    if (way == PushWay::bulk && !layer_.gpu->has_bulk_copies()) continue;
    cuda_check(prepare_push_combine(layer_.config.token_dtype, way), "loading kernels");
  }
}

void GpuExpertCombine::run(const ExpertCall& call, const ExpertCombineInput& input,
                           const GpuExpertTables& tables, int num_sms) const {
  if (pushes(input.options)) return push(call, input, tables, num_sms);
  stage(call, input, tables);
  const CombineParams params = params_.combine(call, input, tables);
  if (nodes_ != nullptr) {
    combine_nodes(call, input, tables, params, num_sms);
  } else {
    sum(params, num_sms, call);
  }
}

/// Whether this combine pushes. All ranks get the same answer.
bool GpuExpertCombine::pushes(const EPCombineOptions& options) const {
  return layer_.memory.slab_slots >= slab_slots(layer_.config, is_once(options));
}

PushParams GpuExpertCombine::push_params(const ExpertCall& call, const ExpertCombineInput& input,
                                         const GpuExpertTables& tables) const {
  const GpuExpertRouting& routing = tables.routing();
  const CombineParams sum = params_.combine(call, input, tables);
  const StageParams stage = params_.stage(call, input, tables);
  const SymmetricBuffer& slab = layer_.memory.receive_slabs[call.parity];
  PushParams params{};
  params.m = sum.m;
  params.shape = sum.shape;
  params.once = is_once(input.options);
  params.slots = static_cast<std::int32_t>(slab_slots(layer_.config, params.once));
  params.by_rank = params.once && layer_.config.world_size < layer_.config.topk;
  params.sums = sums_locally(input.options);
  params.weight_dtype = layer_.config.weight_dtype;
  params.row_bytes = sum.row_bytes;
  params.input = stage.input;
  params.num_rows = stage.num_rows;
  params.num_recv_rows = stage.num_recv_rows;
  params.records = routing.part(routing.fixed().records);
  params.num_input_tokens = stage.num_input_tokens;
  if (params.sums && input.options.weighted) params.received_weights = tables.received_weights();
  params.slabs = near_peers_of<std::byte>(slab, 0, 0, layer_.config.world_size);
  params.flags = near_peers_of<std::uint64_t>(flags_, 0, 0, layer_.config.world_size);
  params.own_slab = slab.local;
  params.own_flags = flags_.local;
  params.addresses = sum.addresses;
  params.lost_row = sum.lost_row;
  params.weights = sum.weights;
  params.biases = {{sum.biases[0], sum.biases[1]}, sum.output};
  return params;
}

void GpuExpertCombine::push(const ExpertCall& call, const ExpertCombineInput& input,
                            const GpuExpertTables& tables, int blocks) const {
  const PushParams params = push_params(call, input, tables);
  const PushBiases& sums = params.biases;
  const bool wide =
      common_word({address_of(params.input), params.row_bytes, address_of(sums.output),
                   address_of(sums.rows[0]), address_of(sums.rows[1])}) == 16;
  const bool bulk =
      wide && layer_.gpu->has_bulk_copies() && waybill::detail::test_hooks().push_words == 0;
  const PushWay way = bulk ? PushWay::bulk : wide ? PushWay::words : PushWay::elements;
  check(launch_push_combine(params, layer_.config.token_dtype, way, blocks, is_alone(),
                            stream_of(call)),
        call);
}

/// Brings expert outputs to where other ranks pull them. All SMs work on it, because memory bounds
/// it and it waits for nobody.
void GpuExpertCombine::stage(const ExpertCall& call, const ExpertCombineInput& input,
                             const GpuExpertTables& tables) const {
  StageParams params = params_.stage(call, input, tables);
  if (params.num_rows == 0 || params.input == params.window) {
    // The caller passes fewer rows than fit. Only the device knows whether more have arrived.
    const bool has_all = params.num_rows >= params.shape.capacity_rows;
    if (!call.may_grow && !has_all) check(launch_check_rows(params, stream_of(call)), call);
  }
  if (params.num_rows == 0) return;
  const int word = common_word({address_of(params.input), params.row_bytes});
  const int blocks = 2 * layer_.gpu->num_sms();
  const cudaStream_t stream = stream_of(call);
  if (sums_locally(input.options)) {
    params.records = tables.routing().part(tables.routing().fixed().records);
    if (input.options.weighted) params.weights = tables.received_weights();
    check(launch_sum_rows(params, layer_.config.token_dtype, layer_.config.weight_dtype, word == 16,
                          blocks, stream),
          call);
  } else if (params.input != params.window) {
    check(launch_copy_rows(params, word, blocks, stream), call);
  }
}

void GpuExpertCombine::sum(const CombineParams& params, int blocks, const ExpertCall& call) const {
  const bool bulk = layer_.gpu->has_bulk_copies() &&
                    common_word({params.row_bytes, address_of(params.output),
                                 address_of(params.biases[0]), address_of(params.biases[1])}) == 16;
  check(launch_combine(params, layer_.config.token_dtype, layer_.config.weight_dtype, bulk, blocks,
                       is_alone(), stream_of(call)),
        call);
}

/// Sums the tokens of other nodes first. Their sums travel while the next ones and those of this
/// node are made.
void GpuExpertCombine::combine_nodes(const ExpertCall& call, const ExpertCombineInput& input,
                                     const GpuExpertTables& tables, const CombineParams& all,
                                     int sms) const {
  const GpuExpertRouting& routing = tables.routing();
  const int blocks = ExpertNodes::kernel_sms(sms);
  const auto sum_tokens = [&](std::int64_t first, std::int64_t count) {
    if (count == 0) return;
    CombineParams part = all;
    const std::int64_t entry = first * layer_.config.topk;
    part.shape.num_tokens = static_cast<std::int32_t>(count);
    part.addresses += entry;
    if (part.weights != nullptr) part.weights += entry * dtype_bytes(layer_.config.weight_dtype);
    part.output = nodes_->sums() + first * all.row_bytes;
    sum(part, blocks, call);
  };
  nodes_->begin_combine(call, routing, sms);
  for (const SumPiece& piece : nodes_->pieces()) {
    sum_tokens(piece.first, piece.count);
    nodes_->finish_piece(call, piece);
  }
  nodes_->finish_pieces(call, routing, sms);
  const std::int64_t own = layer_.config.rank / layer_.config.local_world_size;
  sum_tokens(own * layer_.config.max_tokens, layer_.config.max_tokens);
  nodes_->add_partial_sums(call, input, routing, sms);
}

}  // namespace waybill::cuda
