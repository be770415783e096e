#pragma once

#include <cstdint>
#include <optional>

#include "waybill/core/dtype.h"
#include "waybill/core/topology.h"
#include "waybill/moe/payload_format.h"

namespace waybill {

/// The most topk slots a token may have.
inline constexpr std::int32_t max_topk = 32;

/// The sizes and dtypes of an expert-parallel layer, the same on all ranks, and the number of this
/// rank. Names as in Triton-distributed. Tables of rows and counts are int32.
struct EPConfig {
  std::int64_t max_tokens = 0;  ///< most tokens a rank may dispatch
  std::int64_t hidden = 0;      ///< elements of a token
  std::int32_t topk = 0;        ///< topk slots of a token, also more than num_experts
  std::int32_t num_experts =
      0;  ///< on all ranks; expert e lives on rank e / num_experts_per_rank()
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int32_t local_world_size = 1;    ///< ranks of a node
  DType token_dtype = DType::bfloat16;  ///< or float16, float32, float64; of what combine sums
  DType weight_dtype = DType::float32;  ///< or float16, bfloat16, float64

  [[nodiscard]] std::int32_t num_experts_per_rank() const { return num_experts / world_size; }
  [[nodiscard]] bool is_intra_node() const { return world_size == local_world_size; }
  [[nodiscard]] std::int32_t num_nodes() const { return world_size / local_world_size; }
  [[nodiscard]] Topology topology() const { return {world_size, local_world_size}; }

  /// The rank where an expert lives; world_size for a dropped topk slot.
  [[nodiscard]] std::int32_t rank_of_expert(std::int32_t expert) const {
    return expert / num_experts_per_rank();
  }

  /// @throws InvalidArgument naming the field, unless sizes are positive, topk <= max_topk,
  ///   world_size divides num_experts, local_world_size divides world_size, rank is one of them and
  ///   the dtypes are among those above; `who` begins the text.
  void check(const char* who) const;

  friend bool operator==(const EPConfig&, const EPConfig&) = default;
};

/// Which rows a rank receives.
enum class EPRows : std::uint8_t {
  grouped,  ///< one per topk slot: by local expert, then source rank, then token, then topk slot
  compact,  ///< one per token, however many of its topk slots are here: by source rank, then token
};

/// How rows are laid out. All ranks of a layer say the same.
struct EPDispatchOptions {
  /// The id of a topk slot that goes nowhere: num_experts unless set, as in Triton-distributed, or
  /// -1.
  std::optional<std::int32_t> dropped_id = std::nullopt;
  EPRows rows = EPRows::grouped;
  /// Rows of each local expert are padded to a multiple of this; rows of padding are zeros. Of
  /// grouped rows; with compact rows, of the grouped places that the maps speak of.
  std::int64_t expert_alignment = 1;
  EPPayload payload = EPPayload::plain;
  /// Slots per rank for copies of other ranks' experts. Each dispatch then plans copies with
  /// even_experts, from the rows of all ranks, and rows land in slots: see slot_config.
  std::int32_t spare_experts = 0;
  /// As in EvenExpertsOptions; the alignment there is expert_alignment.
  double limit = 1.0;
  std::int64_t min_rows = 0;

  /// A rank's home experts, then its spare slots.
  [[nodiscard]] std::int32_t slots_per_rank(const EPConfig& config) const {
    return config.num_experts_per_rank() + spare_experts;
  }
  [[nodiscard]] std::int32_t dropped(const EPConfig& config) const {
    return dropped_id.value_or(config.num_experts);
  }

  /// @throws InvalidArgument for a dropped_id that is neither, an alignment < 1, a payload that
  ///   rows of the config cannot be, when a rank could get 2^31 rows or more, or for spare_experts
  ///   outside 0..num_experts, a limit < 1 and min_rows < 0; `who` begins the text.
  void check(const EPConfig& config, const char* who) const;

  friend bool operator==(const EPDispatchOptions&, const EPDispatchOptions&) = default;
};

/// The config of a layer whose experts are slots: slot s of rank r is expert r * slots_per_rank + s
/// there. The tables of a dispatch with spare experts are those of this config. Without spare
/// experts it is `config`.
[[nodiscard]] inline EPConfig slot_config(EPConfig config, const EPDispatchOptions& options) {
  config.num_experts = config.world_size * options.slots_per_rank(config);
  return config;
}

/// The dtype of the rows that travel.
[[nodiscard]] inline DType payload_dtype(const EPConfig& config, const EPDispatchOptions& options) {
  return options.payload.row_dtype(config.token_dtype);
}

/// Items of that dtype in a row: hidden, where an item is an element.
[[nodiscard]] inline std::int64_t payload_columns(const EPConfig& config,
                                                  const EPDispatchOptions& options) {
  return options.payload.row_items(config.hidden);
}

/// Bytes of such a row, without scales.
[[nodiscard]] inline std::int64_t payload_row_bytes(const EPConfig& config,
                                                    const EPDispatchOptions& options) {
  return options.payload.row_bytes(config.token_dtype, config.hidden);
}

/// Columns of the scales of rows, of payload.scale_dtype(): 0 without.
[[nodiscard]] inline std::int64_t num_scales(const EPConfig& config,
                                             const EPDispatchOptions& options) {
  return options.payload.scale_items(config.hidden);
}

[[nodiscard]] inline std::int64_t scale_row_bytes(const EPConfig& config,
                                                  const EPDispatchOptions& options) {
  return options.payload.scale_bytes(config.hidden);
}

/// Dtype and columns of rows as the caller gives them: rows that are quantised on the way come in
/// token_dtype.
[[nodiscard]] inline DType input_dtype(const EPConfig& config, const EPDispatchOptions& options) {
  return options.payload.is_given() ? payload_dtype(config, options) : config.token_dtype;
}
[[nodiscard]] inline std::int64_t input_columns(const EPConfig& config,
                                                const EPDispatchOptions& options) {
  return options.payload.is_given() ? payload_columns(config, options) : config.hidden;
}

/// The most rows that a rank can get, padding among them.
[[nodiscard]] std::int64_t most_recv_rows(const EPConfig& config, const EPDispatchOptions& options);

/// Triton-distributed's growth rule: rows that a buffer of `rows` has after a dispatch in which the
/// largest receiver got `largest`: the same while it fits, else twice `largest` rounded up to 1024.
[[nodiscard]] std::int64_t grown_output_rows(std::int64_t rows, std::int64_t largest);

}  // namespace waybill
