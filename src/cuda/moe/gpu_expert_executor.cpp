#include "gpu_expert_executor.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "../executor/cuda_check.h"
#include "gpu_expert_tables.h"
#include "launch.h"
#include "waybill/core/at.h"
#include "waybill/core/error.h"
#include "waybill/moe/expert_routing.h"
#include "waybill/runtime/executor.h"

namespace waybill::cuda {
namespace {

using waybill::detail::at;

constexpr int default_sms = 16;

cudaStream_t stream_of(const ExpertCall& call) {
  return call.stream == nullptr ? nullptr : static_cast<cudaStream_t>(call.stream->handle);
}

std::int64_t address(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(pointer));
}

/// The widest word, at most 16 bytes, of which all of these are multiples.
int common_word(std::initializer_list<std::int64_t> values) {
  std::int64_t bits = 16;
  for (const std::int64_t value : values) bits |= value;
  return static_cast<int>(bits & -bits);
}

/// Symmetric memory of the executor's own: records and weights of each source's tokens, by parity
/// of the dispatch.
struct RecordBoard {
  std::int64_t records[2] = {};
  std::int64_t weights[2] = {};
  std::int64_t total = 0;

  RecordBoard(const EPConfig& config, const EPDispatchOptions& options) {
    const std::int64_t tokens = std::int64_t{config.world_size} * config.max_tokens;
    const std::int64_t stride = config.topk + (options.rows == EPRows::compact ? 1 : 0);
    const auto take = [&](std::int64_t bytes) {
      const std::int64_t here = total;
      total += (bytes + 255) / 256 * 256;
      return here;
    };
    for (std::int64_t& part : records) part = take(tokens * stride * 4);
    for (std::int64_t& part : weights) {
      part = take(tokens * config.topk * dtype_bytes(config.weight_dtype));
    }
  }
};

class GpuExpertExecutor final : public ExpertExecutor {
 public:
  GpuExpertExecutor(Transport& transport, std::shared_ptr<GpuRank> gpu, int share,
                    const EPConfig& config, const EPDispatchOptions& options,
                    const ExpertMemory& memory)
      : transport_(transport),
        gpu_(std::move(gpu)),
        share_(share),
        config_(config),
        options_(options),
        memory_(memory),
        board_(config, options),
        pool_(std::make_shared<TablePool>(gpu_)) {
    check_supported();
    gpu_->use();
    load_kernels();
    state_ = device_memory(sizeof(MoeState), gpu_->stream());
    tile_counts_ = device_memory(std::int64_t{gpu_->num_sms()} * num_counts(config) * 4,
                                 gpu_->stream());
    faults_ = pinned_memory(sizeof(MoeHostFaults));
    *faults() = {};
    if (options.payload == EPPayload::quantized) {
      elements_ = device_memory(config.max_tokens * config.hidden, gpu_->stream());
      scales_ = device_memory(config.max_tokens * num_scales(config, options) * 4, gpu_->stream());
    }
    records_ = transport_.allocate(board_.total, "expert records");
    const std::int64_t world = config.world_size;
    streams_ = transport_.allocate_signals(world * max_streams + 2 * world, "expert streams");
  }

  GpuExpertExecutor(const GpuExpertExecutor&) = delete;
  GpuExpertExecutor& operator=(const GpuExpertExecutor&) = delete;

  /// Nothing of it is freed while other ranks may still use it.
  ~GpuExpertExecutor() override {
    transport_.abandon(std::move(records_.memory));
    transport_.abandon(std::move(streams_.memory));
    transport_.abandon({state_, tile_counts_, faults_, elements_, scales_, pool_});
  }

  std::shared_ptr<ExpertTables> route(const ExpertCall& call,
                                      const ExpertDispatchInput& input) override {
    begin(call);
    const TableLayout layout(config_, options_, memory_.capacity);
    const bool capturing = is_capturing(call);
    auto tables = std::make_shared<GpuExpertTables>(
        config_, options_, layout, pool_, gpu_, pool_->take(layout, stream_of(call), capturing));
    tables->num_tokens = input.ids.shape[0];
    tables->has_weights = input.weights.data != nullptr;
    tables->ticket = ++last_ticket_;
    tables->stream = stream_of(call);
    RouteParams params = route_params(call, input, *tables);
    params.ids = input.ids.data;
    params.wide_ids = input.ids.dtype == DType::int64;
    params.dropped_id = options_.dropped(config_);
    params.scatter = input.full_scatter_indices.data;
    params.wide_scatter = input.full_scatter_indices.dtype == DType::int64;
    const int blocks = route_blocks(params.shape, num_sms(call));
    check(launch_route(params, blocks, stream_of(call)), call);
    tables->note_use(stream_of(call), capturing);
    return tables;
  }

  void enter(const ExpertCall& call, const ExpertDispatchInput& input,
             ExpertTables& tables) override {
    begin(call);
    auto& the = static_cast<GpuExpertTables&>(tables);
    if (input.weights.data != nullptr) the.has_weights = true;
    const RouteParams params = route_params(call, input, the);
    const int blocks = params.weights == nullptr ? 1 : route_blocks(params.shape, num_sms(call));
    check(launch_enter(params, blocks, stream_of(call)), call);
    the.note_use(stream_of(call), is_capturing(call));
  }

  void dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                ExpertTables& tables) override {
    begin(call);
    auto& the = static_cast<GpuExpertTables&>(tables);
    RowsParams params{};
    params.m = meet(call, 0);
    params.shape = shape(the.num_tokens, the.layout().capacity);
    params.tokens = input.tokens.data;
    params.scales = input.scales.data;
    if (options_.payload == EPPayload::quantized) quantize(call, input, params);
    const bool bulk = cut(params);
    point_windows(call, params);
    point_tables(call, input, the, params);
    const int blocks = num_sms(call);
    params.num_senders = num_sending_blocks(config_, options_, blocks);
    check(launch_rows(params, bulk, blocks, stream_of(call)), call);
    the.are_filled = true;
    the.note_use(stream_of(call), is_capturing(call));
  }

  void combine(const ExpertCall& call, const ExpertCombineInput& input,
               const ExpertTables& tables) override;

  std::int64_t take_overflow() override {
    gpu_->throw_fault("take_overflow");
    throw_bad_inputs();
    const std::int64_t rows = faults()->most_rows;
    faults()->most_rows = 0;
    return rows;
  }

 private:
  void check_supported() const {
    const std::int32_t world = config_.world_size;
    if (!config_.is_intra_node()) {
      throw Unsupported(concat("experts on GPUs: ", world, " ranks on ", config_.num_nodes(),
                               " nodes, expected one node"));
    }
    if (world > max_gpu_ranks) {
      throw Unsupported(
          concat("experts on GPUs: ", world, " ranks, expected at most ", max_gpu_ranks));
    }
    if (config_.num_experts > max_experts_on_gpu(world)) {
      throw Unsupported(concat("experts on GPUs: num_experts = ", config_.num_experts,
                               ", expected at most ", max_experts_on_gpu(world)));
    }
    for (std::int32_t r = 0; r < world; ++r) {
      if (transport_.reach(Rank{r}) == Reach::network) {
        throw Unsupported(concat("experts on GPUs: rank ", r,
                                 " is on another node, expected ranks that reach each other by "
                                 "load and store"));
      }
    }
  }

  void load_kernels() const {
    cuda_check(prepare_route(), "loading kernels");
    cuda_check(prepare_stage(config_.token_dtype), "loading kernels");
    for (const bool bulk : {false, true}) {
      if (bulk && !gpu_->has_bulk_copies()) continue;
      cuda_check(prepare_rows(bulk), "loading kernels");
      cuda_check(prepare_combine(config_.token_dtype, config_.weight_dtype, bulk),
                 "loading kernels");
    }
  }

  void begin(const ExpertCall& call) {
    gpu_->use();
    gpu_->throw_fault(call.operation);
    throw_bad_inputs();
  }

  [[nodiscard]] MoeHostFaults* faults() const {
    return static_cast<MoeHostFaults*>(faults_.get());
  }

  void throw_bad_inputs() const {
    if (faults()->bad_ids != 0) {
      faults()->bad_ids = 0;
      throw InvalidArgument(concat("dispatch: exp_indices of an earlier call hold an id that is "
                                   "neither in 0..",
                                   config_.num_experts - 1, " nor ", options_.dropped(config_),
                                   " (dropped); such choices were dropped"));
    }
    if (faults()->bad_positions != 0) {
      faults()->bad_positions = 0;
      throw InvalidArgument(
          "dispatch: full_scatter_indices of an earlier call hold a position that is not on the "
          "rank of the choice's expert; such choices were dropped");
    }
  }

  void check(cudaError_t status, const ExpertCall& call) const {
    gpu_->check(status, "launching a kernel", call.operation);
  }

  [[nodiscard]] bool is_capturing(const ExpertCall& call) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    gpu_->check(cudaStreamIsCapturing(stream_of(call), &status), "asking about a capture",
                call.operation);
    return status != cudaStreamCaptureStatusNone;
  }

  /// Ranks on one device must fit on it together, as they wait for each other.
  [[nodiscard]] int num_sms(const ExpertCall& call) const {
    const int wanted = call.num_sms > 0 ? call.num_sms : default_sms;
    return std::max(1, std::min(wanted, gpu_->num_sms() / share_));
  }

  [[nodiscard]] MoeMeet meet(const ExpertCall& call, int kind) const {
    MoeMeet m{};
    m.meet.rank = config_.rank;
    m.meet.world_size = config_.world_size;
    m.meet.kind = kind == 0 ? FaultKind::moe_dispatch : FaultKind::moe_combine;
    m.state = static_cast<MoeState*>(state_.get());
    m.meet.state = &m.state->call;
    m.meet.sink = gpu_->sink(share_);
    const std::int64_t slots =
        static_cast<std::int64_t>(ExpertSignal::entered) * config_.world_size;
    m.meet.own_arrivals = memory_.signals.local + slots;
    for (std::int32_t r = 0; r < config_.world_size; ++r) {
      m.meet.peer_arrivals[r] = memory_.signals.peers[at(r)] + slots;
    }
    m.turn = call.parity;
    return m;
  }

  [[nodiscard]] MoeShape shape(std::int64_t num_tokens, std::int64_t capacity) const {
    MoeShape s{};
    s.rank = config_.rank;
    s.world_size = config_.world_size;
    s.num_experts = config_.num_experts;
    s.experts_per_rank = config_.num_experts_per_rank();
    s.topk = config_.topk;
    s.num_tokens = static_cast<std::int32_t>(num_tokens);
    s.max_tokens = static_cast<std::int32_t>(config_.max_tokens);
    s.compact = options_.rows == EPRows::compact ? 1 : 0;
    s.alignment = static_cast<std::int32_t>(options_.expert_alignment);
    s.capacity = capacity;
    return s;
  }

  [[nodiscard]] RouteParams route_params(const ExpertCall& call, const ExpertDispatchInput& input,
                                         const GpuExpertTables& tables) const;
  void quantize(const ExpertCall& call, const ExpertDispatchInput& input, RowsParams& params);
  [[nodiscard]] bool cut(RowsParams& params) const;
  void point_windows(const ExpertCall& call, RowsParams& params) const;
  void point_tables(const ExpertCall& call, const ExpertDispatchInput& input,
                    const GpuExpertTables& tables, RowsParams& params) const;
  void stage(const ExpertCall& call, const ExpertCombineInput& input,
             const GpuExpertTables& tables) const;

  Transport& transport_;
  std::shared_ptr<GpuRank> gpu_;
  int share_;
  EPConfig config_;
  EPDispatchOptions options_;
  const ExpertMemory& memory_;
  RecordBoard board_;
  std::shared_ptr<TablePool> pool_;
  SymmetricBuffer records_;
  SignalPad streams_;
  std::shared_ptr<void> state_;        ///< MoeState
  std::shared_ptr<void> tile_counts_;  ///< scratch of route
  std::shared_ptr<void> faults_;       ///< pinned MoeHostFaults
  std::shared_ptr<void> elements_;     ///< of a quantised payload
  std::shared_ptr<void> scales_;
  std::uint64_t last_ticket_ = 0;
};

RouteParams GpuExpertExecutor::route_params(const ExpertCall& call,
                                            const ExpertDispatchInput& input,
                                            const GpuExpertTables& tables) const {
  RouteParams params{};
  params.m = meet(call, 0);
  params.shape = shape(tables.num_tokens, tables.layout().capacity);
  params.weights = input.weights.data;
  params.weight_bytes = static_cast<std::int32_t>(dtype_bytes(config_.weight_dtype));
  for (std::int32_t r = 0; r < config_.world_size; ++r) {
    params.counts[r] = reinterpret_cast<std::int32_t*>(memory_.board.peers[at(r)] +
                                                       memory_.board_layout.counts[call.parity]);
    std::byte* const board = records_.peers[at(r)];
    params.records[r] = reinterpret_cast<std::int32_t*>(board + board_.records[call.parity]);
    params.sent_weights[r] = board + board_.weights[call.parity];
  }
  params.tile_counts = static_cast<std::int32_t*>(tile_counts_.get());
  const TableLayout& layout = tables.layout();
  params.out_ids = tables.part(layout.ids);
  params.dst_rows = tables.part(layout.dst_rows);
  params.out_weights = tables.part<std::byte>(layout.weights);
  params.places = tables.part<std::int64_t>(layout.places);
  params.num_input_tokens = tables.part(layout.num_input_tokens);
  params.splits = tables.part(layout.splits);
  params.segment_offsets = tables.part(layout.segment_offsets);
  params.expert_counts = tables.part(layout.expert_counts);
  params.expert_offsets = tables.part(layout.expert_offsets);
  params.num_recv_rows = tables.part(layout.num_recv_rows);
  params.host = tables.counts();
  params.faults = faults();
  params.ticket = tables.ticket;
  return params;
}

void GpuExpertExecutor::quantize(const ExpertCall& call, const ExpertDispatchInput& input,
                                 RowsParams& params) {
  QuantizeParams q{};
  q.input = input.tokens.data;
  q.elements = static_cast<std::uint8_t*>(elements_.get());
  q.scales = static_cast<float*>(scales_.get());
  q.num_groups = input.tokens.shape[0] * num_scales(config_, options_);
  params.tokens = static_cast<const std::byte*>(elements_.get());
  params.scales = static_cast<const std::byte*>(scales_.get());
  if (q.num_groups == 0) return;
  check(launch_quantize(q, config_.token_dtype, gpu_->num_sms(), stream_of(call)), call);
}

/// Decides how rows pass through the multiprocessors. @return by bulk copies
bool GpuExpertExecutor::cut(RowsParams& params) const {
  const std::int64_t row_bytes = config_.hidden * dtype_bytes(payload_dtype(config_, options_));
  const std::int64_t scale_bytes = num_scales(config_, options_) * 4;
  const int word =
      common_word({address(params.tokens), row_bytes, address(params.scales), scale_bytes});
  const bool bulk = gpu_->has_bulk_copies() && word == 16;
  params.cuts = cut_rows(row_bytes, static_cast<std::int32_t>(scale_bytes), bulk, word);
  return bulk;
}

void GpuExpertExecutor::point_windows(const ExpertCall& call, RowsParams& params) const {
  const SymmetricBuffer& window = memory_.dispatch_windows[call.parity];
  for (std::int32_t r = 0; r < config_.world_size; ++r) {
    params.windows[r] = window.peers[at(r)] + memory_.window.rows;
    params.streams[r] = streams_.peers[at(r)];
  }
  params.scales_offset = memory_.window.scales - memory_.window.rows;
  params.tags = reinterpret_cast<MoeTag*>(window.local + memory_.window.tags);
  params.weights = window.local + memory_.window.weights;
  params.topk = reinterpret_cast<std::int32_t*>(window.local + memory_.window.topk);
}

void GpuExpertExecutor::point_tables(const ExpertCall& call, const ExpertDispatchInput& input,
                                     const GpuExpertTables& tables, RowsParams& params) const {
  const TableLayout& layout = tables.layout();
  params.places = tables.part<std::int64_t>(layout.places);
  params.fills_tables = !tables.are_filled;
  auto* const kept = tables.part(layout.records);
  params.records = tables.are_filled ? kept
                                     : reinterpret_cast<const std::int32_t*>(
                                           records_.local + board_.records[call.parity]);
  params.kept_records = tables.are_filled ? nullptr : kept;
  if (input.weights.data != nullptr) {
    params.sent_weights = records_.local + board_.weights[call.parity];
  }
  params.weight_bytes = static_cast<std::int32_t>(dtype_bytes(config_.weight_dtype));
  params.num_input_tokens = tables.part(layout.num_input_tokens);
  params.expert_counts = tables.part(layout.expert_counts);
  params.expert_offsets = tables.part(layout.expert_offsets);
  params.kept_tags = tables.part<MoeTag>(layout.tags);
  params.leader_rows = tables.part(layout.leader_rows);
  params.choice_rows = tables.part(layout.choice_rows);
  params.compact_to_grouped = tables.part(layout.compact_to_grouped);
  params.grouped_to_compact = tables.part(layout.grouped_to_compact);
  params.kept_topk = tables.part(layout.topk);
}

/// Expert outputs to where the other ranks pull them.
void GpuExpertExecutor::stage(const ExpertCall& call, const ExpertCombineInput& input,
                              const GpuExpertTables& tables) const {
  StageParams params{};
  params.shape = shape(tables.num_tokens, tables.layout().capacity);
  params.input = input.rows.data;
  params.window = memory_.combine_windows[call.parity].local;
  params.row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  params.num_recv_rows = tables.part(tables.layout().num_recv_rows) + config_.rank;
  params.num_input_tokens = tables.part(tables.layout().num_input_tokens);
  const int word = common_word({address(params.input), params.row_bytes});
  const int blocks = 2 * gpu_->num_sms();
  if (input.options.local_combine && options_.rows == EPRows::grouped) {
    params.records = tables.part(tables.layout().records);
    check(launch_sum_rows(params, config_.token_dtype, word == 16, blocks, stream_of(call)), call);
  } else if (params.input != params.window) {
    check(launch_copy_rows(params, word, blocks, stream_of(call)), call);
  }
}

void GpuExpertExecutor::combine(const ExpertCall& call, const ExpertCombineInput& input,
                                const ExpertTables& tables) {
  begin(call);
  const auto& the = static_cast<const GpuExpertTables&>(tables);
  if (input.rows.shape[0] > 0) stage(call, input, the);
  CombineParams params{};
  params.m = meet(call, 1);
  params.shape = shape(the.num_tokens, the.layout().capacity);
  params.places = the.part<std::int64_t>(the.layout().places);
  for (std::int32_t r = 0; r < config_.world_size; ++r) {
    params.windows[r] = memory_.combine_windows[call.parity].peers[at(r)];
  }
  const bool compact = options_.rows == EPRows::compact;
  params.leaders_only = compact || input.options.local_combine ? 1 : 0;
  params.row_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  for (std::size_t i = 0; i < input.biases.size(); ++i) params.biases[i] = input.biases[i].data;
  if (input.options.weighted) params.weights = the.part<std::byte>(the.layout().weights);
  params.output = input.output.data;
  const bool bulk =
      gpu_->has_bulk_copies() &&
      common_word({params.row_bytes, address(params.output), address(params.biases[0]),
                   address(params.biases[1])}) == 16;
  check(launch_combine(params, config_.token_dtype, config_.weight_dtype, bulk, num_sms(call),
                       stream_of(call)),
        call);
  const_cast<GpuExpertTables&>(the).note_use(stream_of(call), is_capturing(call));
}

}  // namespace

int num_sending_blocks(const EPConfig& config, const EPDispatchOptions& options, int blocks) {
  constexpr double link_gb_s = 345;
  constexpr double block_gb_s = 45;  // that a multiprocessor stores, wherever to
  const double world = config.world_size;
  if (blocks == 1) return 1;
  const double sent = world * (1 - std::pow(1 - 1 / world, config.topk));
  const double all = options.rows == EPRows::compact ? sent : config.topk;
  auto most = static_cast<int>(blocks * sent / all + 0.5);
  if (world > 1) {
    most = std::min(most, static_cast<int>(link_gb_s / block_gb_s * world / (world - 1)));
  }
  return std::clamp(most, 1, blocks);
}

std::unique_ptr<ExpertExecutor> make_gpu_expert_executor(
    Transport& transport, std::shared_ptr<GpuRank> gpu, int share, const EPConfig& config,
    const EPDispatchOptions& options, const ExpertMemory& memory) {
  return std::make_unique<GpuExpertExecutor>(transport, std::move(gpu), share, config, options,
                                             memory);
}

}  // namespace waybill::cuda
