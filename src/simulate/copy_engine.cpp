#include <algorithm>
#include <cstdint>
#include <cstring>

#include "copy_job.h"
#include "core/copy_bytes.h"
#include "core/parallel_for.h"
#include "view_checks.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t copy_item_bytes = std::int64_t{1} << 20;

template <std::size_t ElementBytes>
void copy_elements(std::byte* to, std::int64_t to_step, const std::byte* from,
                   std::int64_t from_step, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step, from + i * from_step, ElementBytes);
  }
}

/// Rows first .. first + count of a segment.
void copy_rows(const CopyJob& job, const CopySegment& segment, std::int64_t first,
               std::int64_t count, bool streaming) {
  const ConstTensorView& source = job.sources[static_cast<std::size_t>(segment.src_rank)];
  const TensorView& output = job.outputs[static_cast<std::size_t>(segment.dst_rank)];
  const std::int64_t hidden = source.shape[1];
  const std::int64_t element_bytes = dtype_bytes(source.dtype);
  const std::int64_t row_bytes = hidden * element_bytes;
  const std::int64_t from_row = step_of(source, 0) * element_bytes;
  const std::int64_t to_row = step_of(output, 0) * element_bytes;
  const std::byte* from = source.data + (segment.src_row + first) * from_row;
  std::byte* to = output.data + (segment.dst_row + first) * to_row;

  const bool unit_steps = hidden == 1 || (source.strides[1] == 1 && output.strides[1] == 1);
  if (unit_steps && (count == 1 || (from_row == row_bytes && to_row == row_bytes))) {
    copy_bytes(to, from, static_cast<std::size_t>(count * row_bytes), streaming);
    return;
  }
  if (unit_steps) {
    for (std::int64_t i = 0; i < count; ++i) {
      copy_bytes(to + i * to_row, from + i * from_row, static_cast<std::size_t>(row_bytes),
                 streaming);
    }
    return;
  }
  const auto copy_row = element_bytes == 1   ? copy_elements<1>
                        : element_bytes == 2 ? copy_elements<2>
                        : element_bytes == 4 ? copy_elements<4>
                                             : copy_elements<8>;
  for (std::int64_t i = 0; i < count; ++i) {
    copy_row(to + i * to_row, output.strides[1] * element_bytes, from + i * from_row,
             source.strides[1] * element_bytes, hidden);
  }
}

/// Segments that write different rows: any thread may take any rows of any segment.
void copy_any_order(const CopyJob& job, const std::vector<CopySegment>& segments,
                    std::int64_t row_bytes, int num_threads) {
  std::vector<std::int64_t> rows_before{0};  // [segments + 1]
  rows_before.reserve(segments.size() + 1);
  for (const CopySegment& segment : segments) {
    rows_before.push_back(rows_before.back() + segment.rows);
  }
  const std::int64_t num_rows = rows_before.back();
  const bool streaming = num_rows > streaming_bytes / row_bytes;
  const std::int64_t grain = std::max<std::int64_t>(1, copy_item_bytes / row_bytes);
  parallel_for(num_rows, grain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const auto after = std::ranges::upper_bound(rows_before, begin);
    auto i = static_cast<std::size_t>(after - rows_before.begin()) - 1;
    for (std::int64_t row = begin; row < end; ++i) {
      const std::int64_t first = row - rows_before[i];
      const std::int64_t count = std::min(segments[i].rows - first, end - row);
      copy_rows(job, segments[i], first, count, streaming);
      row += count;
    }
    if (streaming) finish_streaming();
  });
}

/// Segments of one destination one after another: the last one stays.
void copy_in_order(const CopyJob& job, const std::vector<CopySegment>& segments,
                   const Destinations& destinations, int num_threads) {
  parallel_for(job.world_size(), 1, num_threads, [&](std::int64_t begin, std::int64_t end) {
    const auto first = destinations.offsets[static_cast<std::size_t>(begin)];
    const auto last = destinations.offsets[static_cast<std::size_t>(end)];
    for (std::int64_t k = first; k < last; ++k) {
      const auto i = static_cast<std::size_t>(destinations.segments[static_cast<std::size_t>(k)]);
      copy_rows(job, segments[i], 0, segments[i].rows, false);
    }
  });
}

}  // namespace

void copy_segments(const CopyJob& job, const std::vector<CopySegment>& segments,
                   const Destinations& destinations, int num_threads) {
  const std::int64_t row_bytes =
      job.sources.front().shape[1] * dtype_bytes(job.sources.front().dtype);
  if (segments.empty() || row_bytes == 0) return;
  if (destinations.overlapping) {
    copy_in_order(job, segments, destinations, num_threads);
  } else {
    copy_any_order(job, segments, row_bytes, num_threads);
  }
}

}  // namespace waybill::detail
