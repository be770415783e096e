#include "chunk_program.h"

#include <algorithm>
#include <utility>

#include "../rank/cuda_check.h"
#include "chunk_tokens.h"
#include "core/memory_layout.h"

namespace waybill::cuda {
namespace {

/// Sums of as many tokens are made in pieces, which travel while the next ones are made.
constexpr std::int64_t tokens_in_pieces = 2048;
constexpr std::int32_t pieces_of_node = 4;

/// Puts to one other node of what goes whole, at most.
std::int64_t most_whole_puts(const EPConfig& config) {
  return max_node_parts * (1 + config.max_tokens * config.topk * 8 / max_put_bytes);
}

}  // namespace

ChunkProgram::ChunkProgram(Transport& transport, std::shared_ptr<GpuRank> gpu,
                           const EPConfig& config, std::int64_t most_row_bytes)
    : transport_(transport),
      gpu_(std::move(gpu)),
      config_(config),
      chunk_shift_(chunk_shift(most_row_bytes, config.max_tokens)),
      num_chunks_(static_cast<std::int32_t>(num_chunks(config.max_tokens, chunk_shift_))) {
  if (config_.max_tokens >= tokens_in_pieces) {
    ready_pieces_ = pieces_of_node;
    const std::int64_t each = (config_.max_tokens + pieces_of_node - 1) / pieces_of_node;
    const std::int64_t chunk = std::int64_t{1} << chunk_shift_;
    piece_tokens_ = (each + chunk - 1) / chunk * chunk;
  }
  const std::int64_t steps = others() * (1 + num_chunks_);
  const std::int64_t row_puts = (std::int64_t{num_chunks_} << chunk_shift_) * max_node_parts;
  const std::int64_t puts = others() * (most_whole_puts(config_) + row_puts);
  waybill::detail::MemoryLayout parts;
  const std::int64_t put_table = parts.take(puts * std::int64_t{sizeof(NetworkPut)});
  const std::int64_t step_table = parts.take(steps * std::int64_t{sizeof(NetworkStep)});
  const std::int64_t waits = parts.take(steps * std::int64_t{sizeof(BatchSlot)});
  const std::int64_t signals = parts.take(steps * std::int64_t{sizeof(BatchSlot)});
  const std::int64_t done = parts.take(steps * std::int64_t{sizeof(unsigned)});
  const std::int64_t state = parts.take(sizeof(PathState));
  const std::int64_t ready =
      parts.take((2 + others() * ready_pieces_) * std::int64_t{sizeof(std::uint64_t)});
  memory_ = device_memory(parts.total(), gpu_->stream());
  auto* const base = static_cast<std::byte*>(memory_.get());
  program_ = {
      reinterpret_cast<PathState*>(base + state), reinterpret_cast<NetworkStep*>(base + step_table),
      reinterpret_cast<NetworkPut*>(base + put_table), reinterpret_cast<BatchSlot*>(base + waits),
      reinterpret_cast<BatchSlot*>(base + signals)};
  done_ = reinterpret_cast<unsigned*>(base + done);
  ready_ = reinterpret_cast<std::uint64_t*>(base + ready);
  pad_ = transport.allocate_signals(std::int64_t{config_.num_nodes()} * (1 + num_chunks_),
                                    "expert chunks");
}

ChunkProgram::~ChunkProgram() {
  transport_.defer_release(std::move(pad_.memory));
  transport_.defer_release({memory_});
}

void ChunkProgram::add_to(ListPutsParams& params) const {
  params.chunk_shift = chunk_shift_;
  params.num_chunks = num_chunks_;
  params.whole_slot = 0;
  params.chunk_slot = config_.num_nodes();
  params.ready_pieces = ready_pieces_;
  params.piece_tokens = static_cast<std::int32_t>(piece_tokens_);
  params.out = program_;
}

PathTables ChunkProgram::tables(const ListPutsParams& params) const {
  const std::int64_t whole_steps = params.num_whole > 0 ? others() : 0;
  const std::int64_t row_steps = params.filter != NodeFilter::none ? others() * num_chunks_ : 0;
  return {.num_puts = nullptr,
          .steps = program_.steps,
          .puts = program_.puts,
          .waits = program_.waits,
          .signals = program_.signals,
          .done = done_,
          .ready = ready_,
          .num_steps = static_cast<std::int32_t>(whole_steps + row_steps),
          .first_steps = static_cast<std::int32_t>(whole_steps),
          .steps_of_peer = num_chunks_,
          .one_block_of_peer = false};
}

std::vector<SumPiece> ChunkProgram::pieces() const {
  std::vector<SumPiece> pieces;
  const std::int64_t tokens = config_.max_tokens;
  const std::int64_t nodes = config_.num_nodes();
  const std::int64_t own = config_.rank / config_.local_world_size;
  if (ready_pieces_ == 0) {
    pieces.push_back({(own + 1) * tokens, (nodes - own - 1) * tokens, 0});
    pieces.push_back({0, own * tokens, 1});
    return pieces;
  }
  for (std::int32_t k = 0; k < others(); ++k) {
    const std::int64_t node = (own + 1 + k) % nodes;
    for (std::int32_t i = 0; i < ready_pieces_; ++i) {
      const std::int64_t first = std::min(i * piece_tokens_, tokens);
      const std::int64_t end = std::min(first + piece_tokens_, tokens);
      pieces.push_back({node * tokens + first, end - first, k * ready_pieces_ + i});
    }
  }
  return pieces;
}

}  // namespace waybill::cuda
