#pragma once

#include <cstdint>
#include <type_traits>

namespace waybill {

/// The unit of work of an executor, on the host and on devices: some rows of one of this rank's
/// tensors, or a part of one row, and the remote addresses in windows that hold (or get) the same
/// bytes.
struct RowChunk {
  std::int64_t row = 0;            ///< first row of this rank's tensor
  std::int32_t rows = 0;           ///< more than one only when part_bytes is the whole row
  std::int32_t tensor = 0;         ///< index of the tensor in the call
  std::int32_t col_bytes = 0;      ///< where the part begins in its row
  std::int32_t part_bytes = 0;     ///< of each row
  std::int32_t first_address = 0;  ///< into SequencePlan::addresses
  std::int32_t num_addresses = 0;
};
static_assert(sizeof(RowChunk) == 32 && std::is_trivially_copyable_v<RowChunk>);

/// Adjacent rows of one of this rank's tensors that go the same way, of any number: what chunks are
/// cut from.
struct RowSegment {
  std::int64_t row = 0;  ///< first row of this rank's tensor
  std::int64_t rows = 0;
  std::int32_t tensor = 0;             ///< index of the tensor in the call
  std::int32_t bucket = 0;             ///< distance from rank + 1 to its first address's rank
  std::int32_t first_chunk = 0;        ///< counted in its bucket
  std::int32_t first_address = 0;      ///< of its chunks, into SequencePlan::addresses
  std::int32_t first_destination = 0;  ///< into SequencePlan::segment_addresses
  std::int32_t num_destinations = 0;
};
static_assert(sizeof(RowSegment) == 40 && std::is_trivially_copyable_v<RowSegment>);

/// How the rows of a tensor are cut into chunks: several rows each, or parts of one.
struct RowCut {
  std::int64_t row_bytes = 0;
  std::int32_t rows_each = 1;   ///< rows of a chunk
  std::int32_t part_bytes = 0;  ///< of a row
  std::int32_t parts = 1;       ///< chunks across a row
};

/// A remote address: a byte in the window of a rank, in one word: the rank above, the bytes from
/// the window's begin in the lower 44 bits.
inline constexpr int address_rank_shift = 44;
inline constexpr std::uint64_t address_offset_mask = (std::uint64_t{1} << address_rank_shift) - 1;

/// A chunk that is sent has at most this many addresses; a longer list becomes several chunks.
inline constexpr std::int32_t max_addresses_sent = 8;

}  // namespace waybill
