#include "expert_window.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace waybill::detail {

ExpertWindow::ExpertWindow(const EPConfig& config, const EPDispatchOptions& options,
                           const ExpertMemory& memory, std::byte* base)
    : row_bytes_(payload_row_bytes(config, options)),
      scale_bytes_(scale_row_bytes(config, options)),
      weight_bytes_(dtype_bytes(config.weight_dtype)),
      weights_per_row_(options.rows == EPRows::compact ? config.topk : 1),
      topk_per_row_(options.rows == EPRows::compact ? config.topk : 0),
      rows_(base + memory.window.rows),
      scales_(base + memory.window.scales),
      weights_(base + memory.window.weights),
      tags_(reinterpret_cast<RowTag*>(base + memory.window.tags)),
      topk_(reinterpret_cast<std::int32_t*>(base + memory.window.topk)) {}

void ExpertWindow::clear(std::int64_t idx, bool has_weights) const {
  std::memset(row(idx), 0, row_bytes_);
  std::memset(scales(idx), 0, scale_bytes_);
  if (has_weights) std::memset(weights(idx), 0, weights_per_row_ * weight_bytes_);
  tag(idx) = {-1, -1, -1, -1};
}

void ExpertWindow::copy(std::int64_t from, std::int64_t to) const {
  std::memcpy(row(to), row(from), row_bytes_);
  std::memcpy(scales(to), scales(from), scale_bytes_);
}

namespace {

/// Writes the tokens of one block, one by one.
class Delivery {
 public:
  Delivery(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity_rows,
           std::span<const ExpertWindow> windows, const TokenBlock& block)
      : config_(config),
        compact_(options.rows == EPRows::compact),
        capacity_rows_(capacity_rows),
        windows_(windows),
        block_(block),
        node_(config.rank / config.local_world_size) {}

  void token(std::int64_t token) {
    primary_slots_.fill(-1);
    for (std::int64_t k = 0; k < config_.topk; ++k) {
      const std::size_t entry = token * config_.topk + k;
      const std::int32_t rank = config_.rank_of_expert(block_.ids[entry]);
      const std::int32_t row = block_.places[entry];
      if (rank / config_.local_world_size != node_ || row >= capacity_rows_ || row < 0) continue;
      const ExpertWindow& window = windows_[rank % config_.local_world_size];
      const std::int32_t primary_row = primary_slot_of(rank, token, k);
      if (compact_) {
        if (primary_row == k) first_of_compact(window, rank, token, k, row);
        continue;
      }
      if (primary_row == k) payload(window, token, row);
      const std::int32_t first_row_of_token = block_.places[token * config_.topk + primary_row];
      window.tag(row) = {block_.source_rank, static_cast<std::int32_t>(token),
                         static_cast<std::int32_t>(k), first_row_of_token};
      if (block_.weights != nullptr) {
        std::memcpy(window.weights(row), block_.weights + window.weight_bytes() * entry,
                    window.weight_bytes());
      }
    }
  }

 private:
  /// The first topk slot of the token on that rank that has a row.
  std::int32_t primary_slot_of(std::int32_t rank, std::int64_t token, std::int64_t k) {
    for (std::int64_t j = 0; j < k; ++j) {
      const std::size_t entry = token * config_.topk + j;
      if (primary_slots_[j] == j && config_.rank_of_expert(block_.ids[entry]) == rank) {
        return static_cast<std::int32_t>(j);
      }
    }
    primary_slots_[k] = static_cast<std::int32_t>(k);
    return static_cast<std::int32_t>(k);
  }

  void payload(const ExpertWindow& window, std::int64_t token, std::int32_t row) const {
    std::memcpy(window.row(row), block_.rows + token * window.row_bytes(), window.row_bytes());
    if (window.scale_bytes() == 0) return;
    std::memcpy(window.scales(row), block_.scales + token * window.scale_bytes(),
                window.scale_bytes());
  }

  /// Everything of a compact row, for all topk slots of the token on that rank.
  void first_of_compact(const ExpertWindow& window, std::int32_t rank, std::int64_t token,
                        std::int64_t first, std::int32_t row) const {
    payload(window, token, row);
    window.tag(row) = {block_.source_rank, static_cast<std::int32_t>(token),
                       static_cast<std::int32_t>(first), row};
    const std::size_t bytes = window.weight_bytes();
    if (block_.weights != nullptr) std::memset(window.weights(row), 0, bytes * config_.topk);
    for (std::int64_t k = 0; k < config_.topk; ++k) {
      const std::size_t entry = token * config_.topk + k;
      const std::int32_t id = block_.ids[entry];
      const bool here = config_.rank_of_expert(id) == rank;
      window.topk(row)[k] = here ? id % config_.num_experts_per_rank() : -1;
      if (!here || block_.weights == nullptr) continue;
      std::memcpy(window.weights(row) + bytes * k, block_.weights + bytes * entry, bytes);
    }
  }

  const EPConfig& config_;
  bool compact_;
  std::int64_t capacity_rows_;
  std::span<const ExpertWindow> windows_;
  const TokenBlock& block_;
  std::int32_t node_;
  std::array<std::int32_t, max_topk> primary_slots_{};
};

}  // namespace

void deliver(const EPConfig& config, const EPDispatchOptions& options, std::int64_t capacity_rows,
             std::span<const ExpertWindow> windows, const TokenBlock& block) {
  Delivery delivery(config, options, capacity_rows, windows, block);
  const auto tokens = static_cast<std::int64_t>(block.ids.size()) / config.topk;
  for (std::int64_t t = 0; t < tokens; ++t) delivery.token(t);
}

}  // namespace waybill::detail
