#pragma once

#include <cstdint>
#include <type_traits>

namespace waybill {

/// The unit of work of an executor, on the host and on devices: some rows of one of this rank's
/// tensors, or a part of one row, and the places in windows that hold (or get) the same bytes.
struct RowChunk {
  std::int64_t row = 0;          ///< first row of this rank's tensor
  std::int32_t rows = 0;         ///< more than one only when part_bytes is the whole row
  std::int32_t tensor = 0;       ///< index of the tensor in the call
  std::int32_t col_bytes = 0;    ///< where the part begins in its row
  std::int32_t part_bytes = 0;   ///< of each row
  std::int32_t first_place = 0;  ///< into SequencePlan::places
  std::int32_t num_places = 0;
};
static_assert(sizeof(RowChunk) == 32 && std::is_trivially_copyable_v<RowChunk>);

/// Adjacent rows of one of this rank's tensors that go the same way, of any number: what chunks are
/// cut from.
struct RowSegment {
  std::int64_t row = 0;  ///< first row of this rank's tensor
  std::int64_t rows = 0;
  std::int32_t tensor = 0;       ///< index of the tensor in the call
  std::int32_t bucket = 0;       ///< distance from rank + 1 to its first place's rank
  std::int32_t first_chunk = 0;  ///< counted in its bucket
  std::int32_t first_place = 0;  ///< of its chunks, into SequencePlan::places
  std::int32_t first_copy = 0;   ///< into SequencePlan::segment_places
  std::int32_t num_copies = 0;
};
static_assert(sizeof(RowSegment) == 40 && std::is_trivially_copyable_v<RowSegment>);

/// How the rows of a tensor are cut into chunks: several rows each, or parts of one.
struct RowCut {
  std::int64_t row_bytes = 0;
  std::int32_t rows_each = 1;   ///< rows of a chunk
  std::int32_t part_bytes = 0;  ///< of a row
  std::int32_t parts = 1;       ///< chunks across a row
};

/// A place in the window of a rank, in one word: the rank above, the bytes from the window's begin
/// in the lower 44 bits.
inline constexpr int place_rank_shift = 44;
inline constexpr std::uint64_t place_offset_mask = (std::uint64_t{1} << place_rank_shift) - 1;

/// A chunk that is sent has at most this many places; a longer list becomes several chunks.
inline constexpr std::int32_t max_places_sent = 8;

}  // namespace waybill
