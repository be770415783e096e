#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan_checks.h"
#include "waybill/runtime/sequence_plan.h"

namespace waybill::detail {

/// Cuts lines into chunks, in two passes over the same lines: the first counts the chunks of each
/// bucket (the distance to their first place's rank), the second writes them to where the buckets'
/// interleaved order puts them.
class ChunkWriter {
 public:
  enum class Pass : std::uint8_t { count, write };

  ChunkWriter(SequencePlan& plan, const WindowMap& windows, std::int64_t chunk_bytes);

  void begin(Pass pass);
  void begin_part(const SequencePart& part, std::int32_t first_tensor);

  /// A line of this rank: its rows and their copies (rank, first row there).
  void add_line(std::int64_t row, std::int64_t rows, std::span<const std::int32_t> ranks,
                std::span<const std::int64_t> offsets);

 private:
  struct Copy {
    std::int32_t distance;  ///< from rank + 1: 0 is the next rank, W - 1 this one
    std::int32_t rank;
    std::int64_t row;
  };
  /// How a line of one tensor is cut.
  struct Cut {
    std::int64_t row_bytes;
    std::int64_t rows_each;   ///< rows of a chunk
    std::int64_t part_bytes;  ///< of a row
    std::int64_t parts;       ///< chunks across a row
  };

  [[nodiscard]] Cut cut_of(const TensorFormat& format) const;
  void read_copies(std::span<const std::int32_t> ranks, std::span<const std::int64_t> offsets);
  void add_group(std::int64_t row, std::int64_t rows, std::span<const Copy> copies);
  void write_chunks(std::int64_t row, std::int64_t rows, std::span<const Copy> copies,
                    std::size_t tensor, const Cut& cut);
  void interleave();

  SequencePlan& plan_;
  const WindowMap& windows_;
  std::int64_t chunk_bytes_;
  Pass pass_ = Pass::count;
  std::vector<std::int64_t> bucket_chunks_;  ///< [W]: chunks of each bucket
  std::int64_t num_places_ = 0;
  std::vector<std::int32_t> positions_;  ///< bucket by bucket: where the chunk goes
  std::vector<std::int64_t> next_;       ///< [W]: into positions_
  std::vector<TensorFormat> formats_;
  std::int32_t first_tensor_ = 0;
  std::vector<Copy> copies_;
};

}  // namespace waybill::detail
