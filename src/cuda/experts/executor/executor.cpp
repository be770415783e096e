#include "executor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "../../device/arrive_kernels.h"
#include "../../rank/gpu_rank.h"
#include "../call_params.h"
#include "../kernels.h"
#include "../nodes/nodes.h"
#include "../spare/spare.h"
#include "../tables.h"
#include "core/test_hooks.h"
#include "experts/expert_executor.h"
#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/core/error.h"

namespace waybill::cuda {
namespace {

constexpr const char* barrier_operation = "ep_barrier_all";
constexpr int default_sms = 16;
static_assert(weight_gradient_sums == gradient_partial_sums);

void check_supported(const Transport& transport, const NetworkPath* path, const EPConfig& config,
                     std::int32_t spare_experts) {
  const std::int32_t world = config.world_size;
  if (config.num_experts > max_experts_on_gpu(world)) {
    throw Unsupported(concat("experts on GPUs: num_experts = ", config.num_experts, " of ", world,
                             " ranks, with their ", world * spare_experts,
                             " spare slots, expected at most ", max_experts_on_gpu(world)));
  }
  const std::int32_t local = config.local_world_size;
  for (std::int32_t r = 0; r < world; ++r) {
    const bool of_node = r / local == config.rank / local;
    if (of_node && transport.reach(Rank{r}) == Reach::network) {
      throw Unsupported(concat("experts on GPUs: rank ", r,
                               " is on another node, expected ranks that reach each other by load "
                               "and store"));
    }
  }
  if (config.is_intra_node()) return;
  if (path == nullptr) {
    throw Unsupported(concat("experts on GPUs: ", config.num_nodes(),
                             " nodes, expected one: this world does not carry rows between nodes"));
  }
  const std::int32_t of_world = transport.topology().ranks_per_node;
  if (local != of_world) {
    throw Unsupported(concat("experts on GPUs: local_world_size = ", local, ", expected ", of_world,
                             ", as the nodes of the world"));
  }
}

class GpuExpertExecutor final : public ExpertExecutor {
 public:
  GpuExpertExecutor(const GpuExpertLayer& layer, NetworkPath* path)
      : layer_(layer),
        links_(layer.transport.links()),
        params_(layer_),
        barrier_epochs_(device_memory(2 * sizeof(std::uint64_t), layer.gpu->stream())),
        pool_(std::make_shared<TablePool>(layer.gpu)) {
    const bool nodes = !layer_.config.is_intra_node();
    if (nodes) nodes_ = std::make_unique<ExpertNodes>(layer_, *path, params_);
    if (layer_.options.spare_experts > 0)
      spare_ = std::make_unique<SpareExperts>(layer_, params_.experts_shape(0));
    prepare(nodes);
  }
  GpuExpertExecutor(const GpuExpertExecutor&) = delete;
  GpuExpertExecutor& operator=(const GpuExpertExecutor&) = delete;
  /// Frees nothing while other ranks may still use it.
  ~GpuExpertExecutor() override { layer_.transport.defer_release({pool_, barrier_epochs_}); }

  void release() override {
    layer_.gpu->use();
    params_.release();
    if (nodes_ != nullptr) nodes_->release();
  }

  void realign(const ExpertCall& call, std::uint32_t next_dispatch,
               std::uint32_t next_combine) override {
    if (nodes_ != nullptr) return;
    begin();
    ExpertCall empty = call;
    empty.fingerprint = {.call = CollectiveCall::realign};
    const MoeArrive arrive = params_.arrive(empty, FaultKind::moe_dispatch);
    check(launch_realign(arrive, next_dispatch, next_combine, stream_of(call)), call);
  }

  std::shared_ptr<ExpertTables> route(const ExpertCall& call,
                                      const ExpertDispatchInput& input) override {
    begin();
    const TableCall table_call = table_call_of(call);
    last_ticket_ = (last_ticket_ + 1) & 0xFFFFFFFF;
    auto routing = std::make_shared<GpuExpertRouting>(
        layer_.config, layer_.options, layer_.memory.capacity_rows, input.ids.shape[0],
        last_ticket_, pool_, layer_.gpu, table_call);
    auto tables = std::make_shared<GpuExpertTables>(
        routing, routing, weight_memory(input, table_call), layer_.config.weight_dtype, table_call);
    const bool plans_after_ids = layer_.plans_after_ids();
    if (plans_after_ids) begin_on_nodes(call, input, tables->routing(), true);
    if (spare_ != nullptr)
      spare_->plan(call, params_.count(call, input, *tables), *tables, kernel_sms(call));
    const ExpertDispatchInput routed = of_slots(call, input);
    if (plans_after_ids) {
      nodes_->send_planned(call, input, tables->routing(), num_sms(call));
    } else if (nodes_ != nullptr) {
      begin_on_nodes(call, routed, tables->routing(), true);
    }
    if (nodes_ != nullptr) nodes_->count_rows(call, *tables->being_made());
    const RouteParams params = params_.route(call, routed, *tables);
    const int blocks = num_route_blocks(params.shape, call);
    // No event may be recorded after it: the rows' kernel begins early only if it follows directly.
    if (params_.is_low_latency()) {
      check(launch_low_latency_route(params, blocks, is_alone(), stream_of(call)), call);
    } else {
      check(launch_route(params, blocks, stream_of(call)), call);
    }
    return tables;
  }

  std::shared_ptr<ExpertTables> enter(const ExpertCall& call, const ExpertDispatchInput& input,
                                      const ExpertTables& earlier) override {
    begin();
    const TableCall table_call = table_call_of(call);
    auto tables = std::make_shared<GpuExpertTables>(
        static_cast<const GpuExpertTables&>(earlier).shared_routing(), nullptr,
        weight_memory(input, table_call), layer_.config.weight_dtype, table_call);
    if (nodes_ != nullptr) begin_on_nodes(call, input, tables->routing(), false);
    const EnterParams params = params_.enter(call, input, *tables);
    const int blocks = params.weights == nullptr ? 1 : route_blocks(params.shape, num_sms(call));
    check(launch_enter(params, blocks, is_alone(), stream_of(call)), call);
    return tables;
  }

  void dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                ExpertTables& begun) override {
    begin();
    auto& made_tables = static_cast<GpuExpertTables&>(begun);
    const TableCall table_call = table_call_of(call);
    GpuExpertRouting* const made = made_tables.being_made();
    if (made != nullptr) made->fit(layer_.memory.capacity_rows, table_call);
    RowsParams params = params_.rows(call, of_slots(call, input), made_tables);
    if (call.sums_locally && nodes_ == nullptr && layer_.options.rows == EPRows::grouped) {
      params.kept_weights = keep_weights(made_tables, table_call);
    }
    params.tokens = input.tokens.data;
    params.scales = input.scales.data;
    const int blocks = kernel_sms(call);
    if (nodes_ != nullptr) {
      nodes_->start_rows(call, input, made_tables.routing(), num_sms(call), params);
    } else if (layer_.options.payload.is_quantized()) {
      quantize(call, input, params_.elements(), params_.scales());
      params.tokens = params_.elements();
      params.scales = params_.scales();
    }
    const std::int64_t row_bytes = payload_row_bytes(layer_.config, layer_.options);
    const std::int64_t scale_bytes = scale_row_bytes(layer_.config, layer_.options);
    const int word =
        common_word({address_of(params.tokens), row_bytes, address_of(params.scales), scale_bytes,
                     address_of(params.own_tokens), address_of(params.own_scales)});
    const bool bulk = layer_.gpu->has_bulk_copies() && word == 16;
    params.cuts = cut_rows(row_bytes, static_cast<std::int32_t>(scale_bytes), bulk, word);
    if (layer_.options.rows == EPRows::compact) params.cuts.signal_less();
    params.num_senders =
        num_sending_blocks(links_, layer_.config, layer_.options, blocks, params.shape.num_tokens);
    if (made != nullptr && is_given(input.full_scatter_indices)) claim_rows(call, *made, params);
    const bool early = is_alone() && !layer_.options.payload.is_quantized() && !params.claims_rows;
    if (bulk && early) params.early_work = early_work_of(made_tables, params);
    if (params.early_work == EarlyWork::to_slots) {
      // A block that found no free SM could begin only after the route has ended.
      const int free_sms = layer_.gpu->num_sms() - num_route_blocks(params.shape, call);
      params.num_senders = std::clamp(free_sms, 1, params.num_senders);
    }
    check(launch_rows(params, bulk, early, blocks, stream_of(call)), call);
    if (nodes_ != nullptr && made != nullptr) nodes_->note_runs(call, *made);
    if (nodes_ != nullptr) nodes_->finish_rows(call);
    made_tables.finish(table_call);
  }

  void combine(const ExpertCall& call, const ExpertCombineInput& input,
               const ExpertTables& tables) override {
    begin();
    const auto& made_tables = static_cast<const GpuExpertTables&>(tables);
    stage(call, input, made_tables);
    const CombineParams params = params_.combine(call, input, made_tables);
    if (nodes_ != nullptr) {
      combine_nodes(call, input, made_tables, params);
    } else {
      sum(params, num_sms(call), call);
    }
    made_tables.note_use(table_call_of(call), input.options.weighted);
  }

  void weigh_gradients(const ExpertGradientInput& input, const ExpertTables& tables,
                       const Stream& stream) override {
    begin();
    const auto& made_tables = static_cast<const GpuExpertTables&>(tables);
    if (input.gradients.shape[0] == 0) return;
    const WeightGradientParams params{
        .gradients = input.gradients.data,
        .weights = input.weights.data,
        .rows = input.rows.data,
        .row_gradients = input.row_gradients.data,
        .weight_gradients = reinterpret_cast<float*>(input.weight_gradients.data),
        .hidden = layer_.config.hidden,
        .num_rows = input.gradients.shape[0],
        .num_recv_rows = num_recv_rows(made_tables)};
    const bool wide = layer_.config.hidden % 8 == 0 &&
                      common_word({address_of(params.gradients), address_of(params.rows),
                                   address_of(params.row_gradients)}) == 16;
    layer_.gpu->check(
        launch_weight_gradient(params, layer_.config.token_dtype, layer_.config.weight_dtype, wide,
                               2 * layer_.gpu->num_sms(), stream_of(stream)),
        "launching a kernel", "weigh_gradients");
    made_tables.note_use(table_call(*layer_.gpu, stream_of(stream)), false);
  }

  void copy_rows(const ConstTensorView& from, const TensorView& to, const ExpertTables& tables,
                 const Stream& stream) override {
    begin();
    const auto& made_tables = static_cast<const GpuExpertTables&>(tables);
    if (from.shape[0] == 0) return;
    StageParams params{};
    params.shape.capacity_rows = from.shape[0];  // no row is missing, so nothing is reported
    params.input = from.data;
    params.num_rows = from.shape[0];
    params.window = to.data;
    params.row_bytes = layer_.config.hidden * dtype_bytes(from.dtype);
    params.num_recv_rows = num_recv_rows(made_tables);
    const int word =
        common_word({address_of(params.input), address_of(params.window), params.row_bytes});
    layer_.gpu->check(launch_copy_rows(params, word, 2 * layer_.gpu->num_sms(), stream_of(stream)),
                      "launching a kernel", "copy_rows");
    made_tables.note_use(table_call(*layer_.gpu, stream_of(stream)), false);
  }

  void barrier(const SignalPad& signals, bool of_world, std::uint64_t /*epoch*/,
               const Stream& stream) override {
    begin();
    BarrierParams params{};
    params.rank = layer_.config.rank;
    params.count = of_world ? layer_.config.world_size : layer_.config.local_world_size;
    params.first = layer_.config.rank / params.count * params.count;
    for (std::int32_t i = 0; i < params.count; ++i) {
      // Ranks of another logical node count, too, if their memory is mapped.
      if (signals.memory[params.first + i] == nullptr) return barrier_on_host(stream);
    }
    const std::int64_t first_slot = of_world ? layer_.config.world_size : 0;
    params.epoch = static_cast<std::uint64_t*>(barrier_epochs_.get()) + (of_world ? 1 : 0);
    params.sink = layer_.gpu->sink(layer_.share);
    params.own = signals.local + first_slot;
    params.peers =
        peers_of<std::uint64_t>(signals.table, first_slot * std::int64_t{sizeof(std::uint64_t)});
    layer_.gpu->check(launch_barrier(params, stream_of(stream)), "launching a kernel",
                      barrier_operation);
  }

  ExpertOverflow take_overflow() override {
    layer_.gpu->throw_fault();
    const std::uint64_t word = *params_.overflow();
    *params_.overflow() = 0;
    return {.rows = static_cast<std::int32_t>(word), .call = word >> overflow_epoch_shift};
  }

 private:
  /// Loads the kernels.
  void prepare(bool nodes) const {
    const DType tokens = layer_.config.token_dtype;
    const DType weights = layer_.config.weight_dtype;
    const auto check_load = [](cudaError_t status) { cuda_check(status, "loading kernels"); };
    for (const bool bulk : {false, true}) {
      if (bulk && !layer_.gpu->has_bulk_copies()) continue;
      check_load(prepare_combine(tokens, weights, bulk));
      check_load(prepare_rows(bulk));
    }
    check_load(prepare_route(nodes));
    if (params_.is_low_latency()) check_load(prepare_low_latency_route());
    check_load(prepare_stage(tokens, weights));
    const EPPayload& payload = layer_.options.payload;
    if (payload.is_quantized()) check_load(prepare_quantize(payload.format().name, tokens));
    check_load(prepare_weight_gradient(tokens, weights));
  }

  void begin() const {
    layer_.gpu->use();
    layer_.gpu->throw_fault();
  }

  /// Lets the host wait instead of a kernel, for nodes that reach each other over a network only.
  void barrier_on_host(const Stream& stream) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    layer_.gpu->check(cudaStreamIsCapturing(stream_of(stream), &status), "asking a stream",
                      barrier_operation);
    if (status != cudaStreamCaptureStatusNone) {
      throw Unsupported(concat(barrier_operation, ": the host waits for ranks of other nodes, ",
                               "which a graph cannot hold: expected intra_node_only = true, or no ",
                               "capture"));
    }
    layer_.gpu->wait_for(stream_of(stream), "waiting for a stream", barrier_operation);
    layer_.transport.barrier(barrier_operation);
  }

  /// With spare experts slots stand in place of ids once they are planned. Where they replace the
  /// ids of all nodes, nobody reads those of the caller any more.
  [[nodiscard]] ExpertDispatchInput of_slots(const ExpertCall& call,
                                             const ExpertDispatchInput& input) const {
    ExpertDispatchInput routed = input;
    if (spare_ != nullptr && !layer_.plans_after_ids())
      routed.ids = spare_->slot_ids(call, input.tokens.shape[0]);
    return routed;
  }

  /// The number of rows that this rank has received, on the device.
  [[nodiscard]] const std::int32_t* num_recv_rows(const GpuExpertTables& tables) const {
    const GpuExpertRouting& routing = tables.routing();
    return routing.part(routing.tables().num_recv_rows) + layer_.config.rank;
  }

  /// If the host has waited for the counts, all addresses are known when it launches the rows.
  static EarlyWork early_work_of(const GpuExpertTables& tables, const RowsParams& params) {
    if (tables.being_made() == nullptr) return EarlyWork::loads;
    const bool fits =
        params.receive_slots.tokens > 0 && params.shape.num_tokens <= params.receive_slots.tokens;
    return fits && !tables.routing().has_waited() ? EarlyWork::to_slots : EarlyWork::nothing;
  }

  [[nodiscard]] int num_route_blocks(const MoeShape& shape, const ExpertCall& call) const {
    return params_.is_low_latency() ? low_latency_route_blocks(shape, num_sms(call))
                                    : route_blocks(shape, kernel_sms(call));
  }

  /// Brings expert outputs to where other ranks pull them. All SMs work on it, because memory
  /// bounds it and it waits for nobody.
  void stage(const ExpertCall& call, const ExpertCombineInput& input,
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
      params.records = tables.routing().part(tables.routing().tables().records);
      if (input.options.weighted) params.weights = tables.received_weights();
      check(launch_sum_rows(params, layer_.config.token_dtype, layer_.config.weight_dtype,
                            word == 16, blocks, stream),
            call);
    } else if (params.input != params.window) {
      check(launch_copy_rows(params, word, blocks, stream), call);
    }
  }

  void sum(const CombineParams& params, int blocks, const ExpertCall& call) const {
    const bool bulk =
        layer_.gpu->has_bulk_copies() &&
        common_word({params.row_bytes, address_of(params.output), address_of(params.biases[0]),
                     address_of(params.biases[1])}) == 16;
    check(launch_combine(params, layer_.config.token_dtype, layer_.config.weight_dtype, bulk,
                         blocks, is_alone(), stream_of(call)),
          call);
  }

  /// Sums the tokens of other nodes first. Their sums travel while the next ones and those of this
  /// node are made.
  void combine_nodes(const ExpertCall& call, const ExpertCombineInput& input,
                     const GpuExpertTables& tables, const CombineParams& all) const {
    const int sms = num_sms(call);
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

  [[nodiscard]] bool sums_locally(const EPCombineOptions& options) const {
    return options.local_combine && nodes_ == nullptr && layer_.options.rows == EPRows::grouped;
  }

  /// Whether kernels may take their places early. With several ranks on the device early blocks
  /// would take the places that another rank needs to proceed. With several nodes other kernels
  /// come between.
  [[nodiscard]] bool is_alone() const { return layer_.share == 1 && nodes_ == nullptr; }

  void check(cudaError_t status, const ExpertCall& call) const {
    layer_.gpu->check(status, "launching a kernel", call.operation);
  }

  [[nodiscard]] TableCall table_call_of(const ExpertCall& call) const {
    return table_call(*layer_.gpu, stream_of(call));
  }

  /// Memory for the weights of a dispatch, if it carries any.
  [[nodiscard]] TableMemory weight_memory(const ExpertDispatchInput& input,
                                          const TableCall& call) const {
    if (!is_given(input.weights)) return {};
    const std::int64_t topk_slots =
        layer_.config.num_nodes() * layer_.config.max_tokens * layer_.config.topk;
    return pool_->take(topk_slots * dtype_bytes(layer_.config.weight_dtype), false, call);
  }

  /// Memory for the weights of received rows, which outlive those in the window.
  /// @return null without weights
  [[nodiscard]] std::byte* keep_weights(GpuExpertTables& tables, const TableCall& call) const {
    if (!tables.has_weights()) return nullptr;
    const std::int64_t rows = tables.routing().tables().capacity_rows;
    return tables.keep_weights(
        pool_->take(rows * dtype_bytes(layer_.config.weight_dtype), false, call));
  }

  /// Blocks of a kernel. Ranks that share a device wait for each other, so their blocks must fit on
  /// it together.
  [[nodiscard]] int num_sms(const ExpertCall& call) const {
    const int wanted = call.num_sms > 0 ? call.num_sms : default_sms;
    return std::max(1, std::min(wanted, layer_.gpu->num_sms() / layer_.share));
  }

  /// Those of them that are not needed for a network path.
  [[nodiscard]] int kernel_sms(const ExpertCall& call) const {
    return nodes_ != nullptr ? ExpertNodes::kernel_sms(num_sms(call)) : num_sms(call);
  }

  void begin_on_nodes(const ExpertCall& call, const ExpertDispatchInput& input,
                      const GpuExpertRouting& routing, bool counts) {
    if (layer_.options.payload.is_quantized())
      quantize(call, input, nodes_->own_rows(), nodes_->own_scales());
    nodes_->begin_dispatch(call, input, routing, counts, num_sms(call));
  }

  /// Converts tokens to the payload's format.
  void quantize(const ExpertCall& call, const ExpertDispatchInput& input, std::byte* elements,
                std::byte* scales) {
    const QuantizeParams params{.input = input.tokens.data,
                                .elements = elements,
                                .scales = scales,
                                .num_rows = input.tokens.shape[0],
                                .hidden = layer_.config.hidden,
                                .scale_bytes = scale_row_bytes(layer_.config, layer_.options)};
    check(launch_quantize(params, layer_.options.payload.format().name, layer_.config.token_dtype,
                          stream_of(call)),
          call);
  }

  /// Lets receivers see that a row is taken twice.
  void claim_rows(const ExpertCall& call, GpuExpertRouting& made, RowsParams& params) const {
    params.claims_rows = true;
    layer_.gpu->check(
        cudaMemsetAsync(made.part(made.tables().primary_rows), 0xFF,
                        static_cast<std::size_t>(made.tables().capacity_rows) * 4, stream_of(call)),
        "clearing a table", call.operation);
  }

  const GpuExpertLayer layer_;
  const LinkSpeeds links_;  ///< as they were when the layer was made
  ExpertParams params_;
  std::shared_ptr<void> barrier_epochs_;  ///< [2] on the device: for the node, for the world
  std::unique_ptr<ExpertNodes> nodes_;    ///< null on one node
  std::unique_ptr<SpareExperts> spare_;   ///< null without spare experts
  std::shared_ptr<TablePool> pool_;
  std::uint64_t last_ticket_ = 0;
};

}  // namespace

int num_sending_blocks(const LinkSpeeds& links, const EPConfig& config,
                       const EPDispatchOptions& options, int blocks, std::int64_t num_tokens) {
  const double fill_links = links.nvlink_bytes_per_second / links.block_bytes_per_second;
  // With few tokens per warp no receiver waits long for a warp that still sends, so all warps do
  // both.
  if (blocks == 1 || num_tokens <= std::int64_t{2} * ring_warps * blocks) return blocks;
  const double world = config.world_size;
  const double sent = world * (1 - std::pow(1 - 1 / world, config.topk));
  const double all = options.rows == EPRows::compact ? sent : config.topk;
  auto senders = static_cast<int>(std::lround(blocks * sent / all));
  if (world > 1) {
    senders = static_cast<int>(std::min<double>(senders, fill_links * world / (world - 1)));
  }
  return std::clamp(senders, 1, blocks);
}

std::unique_ptr<ExpertExecutor> make_gpu_expert_executor(Transport& transport,
                                                         std::shared_ptr<GpuRank> gpu, int share,
                                                         NetworkPath* path, const EPConfig& config,
                                                         const EPDispatchOptions& options,
                                                         const ExpertMemory& memory) {
  gpu->use();
  const EPConfig slots = slot_config(config, options);
  check_supported(transport, path, slots, options.spare_experts);
  const bool reaches_all = slots.is_intra_node() || path->maps_peers();
  return std::make_unique<GpuExpertExecutor>(
      GpuExpertLayer{transport, std::move(gpu), share, slots, config, options, memory, reaches_all},
      path);
}

}  // namespace waybill::cuda
