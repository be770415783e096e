#pragma once

#include <cstdint>

#include "params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

// A combine that pushes: ranks send what their experts made of a token to a slab at the token's
// home, which has a row of fixed place for each. docs/decisions/push_combine.md

/// What is pushed, signalled and summed together: some neighbouring tokens, a part of their rows.
struct PushUnits {
  std::int32_t group;       ///< tokens
  std::int32_t parts;       ///< of a row
  std::int32_t part_bytes;  ///< but for the last
};

inline constexpr std::int32_t few_pushed_tokens = 512;
inline constexpr std::int32_t most_push_parts = 8;
inline constexpr std::int32_t most_push_group = 4;

/// All ranks say the same. @param most_tokens of the rank that has the most
__host__ __device__ constexpr PushUnits push_units(std::int32_t most_tokens, std::int32_t topk,
                                                   std::int64_t row_bytes) {
  constexpr std::int32_t piece_bytes = 2048;
  PushUnits units{1, 1, static_cast<std::int32_t>(row_bytes)};
  if (most_tokens > few_pushed_tokens) {
    const std::int32_t together = 32 / topk;
    units.group = together < most_push_group ? together : most_push_group;
    return units;
  }
  const auto pieces = static_cast<std::int32_t>((row_bytes + piece_bytes - 1) / piece_bytes);
  units.parts = pieces < most_push_parts ? pieces : most_push_parts;
  units.part_bytes =
      static_cast<std::int32_t>((row_bytes + units.parts - 1) / units.parts + 15) / 16 * 16;
  units.parts = static_cast<std::int32_t>((row_bytes + units.part_bytes - 1) / units.part_bytes);
  return units;
}

/// Units of a rank's tokens, at most: each has a flag of each rank.
constexpr std::int64_t most_push_units(std::int64_t max_tokens, std::int32_t topk) {
  const std::int64_t few = (max_tokens < few_pushed_tokens ? max_tokens : few_pushed_tokens);
  const std::int32_t group = push_units(few_pushed_tokens + 1, topk, 1).group;
  const std::int64_t many = (max_tokens + group - 1) / group;
  return few * most_push_parts > many ? few * most_push_parts : many;
}

/// What the sums of tokens begin with.
struct PushBiases {
  const std::byte* rows[2];  ///< as the output; or null
  std::byte* output;
};

/// How a rank moves rows of a combine that pushes; each as it can.
enum class PushWay : std::int32_t {
  bulk,      ///< bulk copies, sm_90 and later: rows are multiples of 16 bytes at such addresses
  words,     ///< words of 16 bytes: the same of rows
  elements,  ///< any
};

struct PushParams {
  MoeArrive m;
  MoeShape shape;
  std::int32_t slots;  ///< rows of a token in a slab
  bool once;           ///< one row of a token from each rank
  bool by_rank;        ///< that row's place: the rank; else its first topk slot there
  bool sums;           ///< a rank's rows of a token become one before they travel
  DType weight_dtype;
  std::int64_t row_bytes;
  // What this rank pushes.
  const std::byte* input;
  std::int64_t num_rows;              ///< of the input
  const std::int32_t* num_recv_rows;  ///< of this rank
  const std::int32_t* records;        ///< [W, M, record_stride]
  const std::int32_t* num_input_tokens;
  const std::byte* received_weights;  ///< of the input's rows, for weighted sums here; or null
  NearPeers<std::byte> slabs;         ///< [M, slots] rows of each rank
  NearPeers<std::uint64_t> flags;     ///< of each rank: [units, W], raised to the epoch
  // What it sums.
  const std::byte* own_slab;
  const std::uint64_t* own_flags;
  const std::int64_t* addresses;
  const std::byte* lost_row;  ///< NaN, see lost_address
  const std::byte* weights;   ///< [T, K] or null
  PushBiases biases;
};
static_assert(sizeof(PushParams) <= 4096);

}  // namespace waybill::cuda
