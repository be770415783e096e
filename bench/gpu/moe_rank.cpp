#include "moe_rank.h"

#include <algorithm>

#include "core/number.h"
#include "core/to_size.h"
#include "rows.h"
#include "transport/transport.h"

namespace waybill::bench {
namespace {

using detail::to_size;

void check(cudaError_t status, const char* doing) {
  if (status != cudaSuccess) {
    throw InternalError(concat("moe: ", doing, ": ", cudaGetErrorString(status)));
  }
}

template <class T>
std::vector<T> download(const void* from, std::int64_t count) {
  std::vector<T> result(count);
  check(cudaMemcpy(result.data(), from, result.size() * sizeof(T), cudaMemcpyDefault), "reading");
  return result;
}

}  // namespace

MoeRank::MoeRank(World& world, const MoeWorkload& workload, const EPDispatchOptions& options)
    : world_(world), workload_(workload), config_(workload.config), options_(options) {
  config_.rank = to_int(world.rank());
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  as_stream_ = {stream_};
  const MoeRows rows = rows_of(workload);
  const std::int64_t capacity_rows = options.rows == EPRows::compact ? rows.compact : rows.grouped;
  memory_.capacity_rows = capacity_rows;
  memory_.window = expert_window_layout(config_, options_, capacity_rows);
  memory_.workspace_layout = expert_workspace_layout(config_, options_);
  Transport& transport = world.transport();
  const std::int64_t sum_bytes = config_.hidden * dtype_bytes(config_.token_dtype);
  for (int parity = 0; parity < 2; ++parity) {
    memory_.dispatch_windows[parity] = transport.allocate(memory_.window.total, "dispatch");
    memory_.combine_windows[parity] = transport.allocate(capacity_rows * sum_bytes, "combine");
    fill_rows({memory_.combine_windows[parity].local, config_.token_dtype,
               Shape{capacity_rows, config_.hidden}},
              config_.rank, 7);
  }
  memory_.workspace = transport.allocate(memory_.workspace_layout.total, "workspace");
  memory_.signals = transport.allocate_signals(
      with_fingerprints(num_layer_signals(config_.world_size), config_.world_size), "signals");
  executor_ = make_expert_executor(world, config_, options_, memory_);
  const auto& ids = workload.ids[config_.rank];
  const std::int64_t tokens = std::ssize(ids) / config_.topk;
  const bool quantized = options_.payload.is_quantized();
  const DType dtype = input_dtype(config_, options_);
  const std::int64_t columns = input_columns(config_, options_);
  const TensorView rows_in(memory(tokens * columns * dtype_bytes(dtype)), dtype, {tokens, columns});
  fill_rows(rows_in, config_.rank, 0);
  input_.tokens = rows_in;
  void* const device_ids = memory(std::ssize(ids) * 4);
  check(cudaMemcpy(device_ids, ids.data(), ids.size() * 4, cudaMemcpyDefault), "copying ids");
  input_.ids = ConstTensorView(device_ids, DType::int32, {tokens, config_.topk});
  input_.weights =
      ConstTensorView(memory(std::ssize(ids) * 4), DType::float32, {tokens, config_.topk});
  if (const std::int64_t scales = num_scales(config_, options_); scales > 0 && !quantized) {
    input_.scales = ConstTensorView(memory(tokens * scale_row_bytes(config_, options_)),
                                    options_.payload.scale_dtype(), {tokens, scales});
  }
  outputs_ = {memory(capacity_rows * sum_bytes), config_.token_dtype,
              Shape{capacity_rows, config_.hidden}};
  fill_rows(outputs_, config_.rank, 7);
  sums_ = {memory(tokens * sum_bytes), config_.token_dtype, Shape{tokens, config_.hidden}};
}

MoeRank::~MoeRank() {
  tables_.reset();
  for (void* part : allocated_) (void)cudaFree(part);
  (void)cudaStreamDestroy(stream_);
}

void* MoeRank::memory(std::int64_t bytes) {
  void* part = nullptr;
  check(cudaMalloc(&part, std::max<std::int64_t>(bytes, 16)), "allocating");
  allocated_.push_back(part);
  check(cudaMemset(part, 0, to_size(bytes)), "clearing");
  return part;
}

std::int64_t MoeRank::row_bytes() const { return payload_row_bytes(config_, options_); }

ExpertCall MoeRank::next_call(const char* operation, std::uint64_t number) {
  return {operation, &memory_,   ++calls_, static_cast<std::uint32_t>(number % 2),
          num_sms_,  &as_stream_};
}

void MoeRank::route() { tables_ = executor_->route(next_call("dispatch", dispatches_++), input_); }

void MoeRank::dispatch() {
  const ExpertCall call = next_call("dispatch", dispatches_++);
  const auto tables = executor_->route(call, input_);
  executor_->dispatch(call, input_, *tables);
  tables_ = tables;
}

void MoeRank::dispatch_again() {
  const ExpertCall call = next_call("dispatch", dispatches_++);
  ExpertDispatchInput input = input_;
  input.weights = {};
  const auto tables = executor_->enter(call, input, *tables_);
  executor_->dispatch(call, input, *tables);
}

void MoeRank::combine(const EPCombineOptions& options, bool staged) {
  const ExpertCall call = next_call("combine", combines_++);
  ExpertCombineInput input;
  input.options = options;
  input.rows = outputs_;
  if (staged) input.rows.data = memory_.combine_windows[call.parity].local;
  input.output = sums_;
  executor_->combine(call, input, *tables_);
}

void MoeRank::check_rows() {
  const std::byte* const window = memory_.dispatch_windows[(dispatches_ - 1) % 2].local;
  const auto counts = tables_->wait_counts();
  const std::int64_t rows = counts[config_.rank];
  const auto tags = download<std::int32_t>(window + memory_.window.tags, rows * 4);
  const std::int64_t words = row_bytes() / 8;
  for (std::int64_t row = 0; row < rows; row += 1 + rows / 97) {
    const std::int32_t source = tags[row * 4];
    const std::int32_t token = tags[row * 4 + 1];
    const auto got =
        download<std::uint64_t>(window + memory_.window.rows + row * row_bytes(), words);
    for (std::int64_t i = 0; i < words; ++i) {
      if (got[i] != word_of(source, 0, static_cast<std::uint64_t>(token * words + i))) {
        throw InternalError(concat("moe: row ", row, " of rank ", config_.rank, " (token ", token,
                                   " of rank ", source, ") is wrong in word ", i));
      }
    }
  }
}

void MoeRank::check_quantized_rows() {
  const std::byte* const window = memory_.dispatch_windows[(dispatches_ - 1) % 2].local;
  const std::int64_t rows = tables_->wait_counts()[config_.rank];
  const auto tags = download<std::int32_t>(window + memory_.window.tags, rows * 4);
  const std::int64_t scale_bytes = scale_row_bytes(config_, options_);
  std::vector<std::uint64_t> token(to_size(config_.hidden / 4));  // of bfloat16
  std::vector<std::uint8_t> elements(to_size(row_bytes()));
  std::vector<std::uint8_t> scales(to_size(scale_bytes));
  for (std::int64_t row = 0; row < rows; row += 1 + rows / 97) {
    const auto first = static_cast<std::uint64_t>(tags[row * 4 + 1]) * token.size();
    for (std::size_t i = 0; i < token.size(); ++i) token[i] = word_of(tags[row * 4], 0, first + i);
    quantize_row(options_.payload.format(), token.data(), config_.token_dtype, elements, scales);
    if (download<std::uint8_t>(window + memory_.window.rows + row * row_bytes(), row_bytes()) !=
            elements ||
        download<std::uint8_t>(window + memory_.window.scales + row * scale_bytes, scale_bytes) !=
            scales) {
      throw InternalError(concat("moe: row ", row, " of rank ", config_.rank, " (token ",
                                 tags[row * 4 + 1], " of rank ", tags[row * 4],
                                 ") is not what quantize_row() makes of it"));
    }
  }
}

std::vector<float> MoeRank::sum_of(std::int64_t token, const std::vector<std::int32_t>& rows,
                                   bool local) const {
  const auto& ids = workload_.ids[config_.rank];
  const bool compact = options_.rows == EPRows::compact;
  const std::int64_t words = config_.hidden / 4;
  std::vector<float> sums(config_.hidden);
  std::vector<std::vector<float>> parts;  // of ranks in the order of the topk slots
  std::vector<std::int32_t> ranks;
  for (std::int64_t k = 0; k < config_.topk; ++k) {
    const std::int32_t id = ids[token * config_.topk + k];
    if (id == config_.num_experts) continue;
    const std::int32_t rank = config_.rank_of_expert(id);
    auto part = static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
    if (part < ranks.size() && compact) continue;
    if (part == ranks.size() || !local) {
      part = ranks.size();
      ranks.push_back(rank);
      parts.emplace_back(sums.size());
    }
    const std::int64_t row = rows[token * config_.topk + k];
    for (std::int64_t e = 0; e < config_.hidden; ++e) {
      const auto word = word_of(rank, 7, static_cast<std::uint64_t>(row * words + e / 4));
      parts[part][e] += bfloat16_to_float(static_cast<std::uint16_t>(word >> (e % 4 * 16)));
    }
  }
  for (const auto& part : parts) {
    for (std::size_t e = 0; e < sums.size(); ++e) {
      sums[e] += bfloat16_to_float(float_to_bfloat16(part[e]));
    }
  }
  return sums;
}

void MoeRank::check_sums(bool local) {
  if (!config_.is_intra_node()) return;  // rows on other nodes are known there alone
  const auto& ids = workload_.ids[config_.rank];
  const std::int64_t tokens = std::ssize(ids) / config_.topk;
  const auto rows = download<std::int32_t>(tables_->views().dst_rows.data, std::ssize(ids));
  for (std::int64_t t = 0; t < tokens; t += 1 + tokens / 53) {
    const auto got = download<std::uint16_t>(sums_.data + t * config_.hidden * 2, config_.hidden);
    const std::vector<float> sums = sum_of(t, rows, local);
    for (std::int64_t e = 0; e < config_.hidden; ++e) {
      if (got[e] != float_to_bfloat16(sums[e])) {
        throw InternalError(
            concat("moe: sum of token ", t, " of rank ", config_.rank, " is wrong in element ", e));
      }
    }
  }
}

}  // namespace waybill::bench
