#include "plan_checks.h"

#include <algorithm>
#include <limits>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t max_rows = std::int64_t{1} << 44;
constexpr std::int64_t alignment_bytes = 256;

void check_offsets(const char* who, const char* name, std::span<const std::int64_t> offsets,
                   std::int64_t num_parts, std::int64_t last) {
  require(std::ssize(offsets) == num_parts + 1, who, ": ", name, " has ", offsets.size(),
          " values, expected ", num_parts + 1);
  require(offsets.front() == 0 && offsets.back() == last, who, ": ", name, " goes from ",
          offsets.front(), " to ", offsets.back(), ", expected 0 to ", last);
  require(std::ranges::is_sorted(offsets), who, ": ", name, " is not ascending");
}

/// Whether all values are in 0..end - 1, a power of two; without a branch a value, as tables are
/// long.
bool all_below_power(std::span<const std::int64_t> values, std::int64_t end) {
  std::uint64_t bits = 0;
  for (const std::int64_t value : values) bits |= static_cast<std::uint64_t>(value);
  return bits < static_cast<std::uint64_t>(end);
}

bool all_below(std::span<const std::int32_t> values, std::int32_t end) {
  std::int32_t most = 0;
  std::int32_t least = 0;
  for (const std::int32_t value : values) {
    most = value > most ? value : most;
    least = value < least ? value : least;
  }
  return least >= 0 && most < end;
}

/// Names the value that is not as it should be.
void check_values(const char* who, const SparseMetadata& metadata) {
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    const std::int64_t rows = metadata.seq_len[j];
    require(0 <= rows && rows < max_rows, who, ": seq_len[", j, "] = ", rows,
            ", expected 0..2^44 - 1");
  }
  for (std::int64_t c = 0; c < metadata.num_destinations(); ++c) {
    const std::int32_t r = metadata.dst_rank[c];
    const std::int64_t row = metadata.dst_offset[c];
    require(0 <= r && r < metadata.world_size, who, ": dst_rank[", c, "] = ", r, ", expected 0..",
            metadata.world_size - 1);
    require(0 <= row && row < max_rows, who, ": dst_offset[", c, "] = ", row,
            ", expected 0..2^44 - 1");
  }
}

void check_metadata(const char* who, const SparseMetadata& metadata) {
  const std::int64_t entries = metadata.num_entries();
  const std::int64_t copies = metadata.num_destinations();
  require(1 <= metadata.world_size && metadata.world_size <= max_world_size, who,
          ": world_size = ", metadata.world_size, ", expected 1..", max_world_size);
  check_offsets(who, "rank_offsets", metadata.rank_offsets, metadata.world_size, entries);
  if (metadata.copy_offsets.empty()) {
    require(copies == entries, who, ": dst_rank has ", copies, " values, expected ", entries,
            ", one per entry");
  } else {
    check_offsets(who, "copy_offsets", metadata.copy_offsets, entries, copies);
  }
  require(std::ssize(metadata.dst_offset) == copies, who, ": dst_offset has ",
          metadata.dst_offset.size(), " values, expected ", copies, ", as many as dst_rank");
  if (all_below_power(metadata.seq_len, max_rows) &&
      all_below_power(metadata.dst_offset, max_rows) &&
      all_below(metadata.dst_rank, metadata.world_size)) {
    return;
  }
  check_values(who, metadata);
}

}  // namespace

void check_parts(const char* who, std::span<const SequencePart> parts, Rank rank) {
  for (const SequencePart& part : parts) {
    require(part.metadata != nullptr, who, ": a part has no metadata");
    check_metadata(who, *part.metadata);
    require(0 <= part.min_window_rows && part.min_window_rows < max_rows, who,
            ": min_window_rows = ", part.min_window_rows, ", expected 0..2^44 - 1");
    require(part.metadata->world_size == parts.front().metadata->world_size, who,
            ": parts have world_size ", parts.front().metadata->world_size, " and ",
            part.metadata->world_size, ", expected one world");
  }
  const std::int32_t world = parts.front().metadata->world_size;
  require(0 <= to_int(rank) && to_int(rank) < world, who, ": rank = ", rank, ", expected 0..",
          world - 1);
}

void check_traffic(const char* who, std::span<const SequencePart> parts) {
  double bytes = 0;
  for (const SequencePart& part : parts) {
    const SparseMetadata& metadata = *part.metadata;
    double rows = 0;
    for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
      const std::int64_t copies = metadata.destination_end(j) - metadata.destination_begin(j);
      rows += static_cast<double>(metadata.seq_len[j]) * static_cast<double>(1 + copies);
    }
    double row_bytes = 1;
    for (const TensorFormat& format : part.tensors)
      row_bytes += static_cast<double>(format.row_bytes());
    bytes += rows * row_bytes;
  }
  require(bytes < most_call_bytes, who, ": the copies of all rows have ", bytes,
          " bytes, expected below 2^60");
}

std::vector<std::int64_t> rows_needed(const SequencePart& part) {
  const SparseMetadata& metadata = *part.metadata;
  std::vector<std::int64_t> rows(metadata.world_size, part.min_window_rows);
  for (std::int64_t j = 0; j < metadata.num_entries(); ++j) {
    const std::int64_t len = metadata.seq_len[j];
    if (len == 0) continue;
    for (std::int64_t c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
      std::int64_t& end = rows[metadata.dst_rank[c]];
      end = std::max(end, metadata.dst_offset[c] + len);
    }
  }
  return rows;
}

TensorFormat sum_format(const TensorFormat& format) {
  return {format.dtype == DType::float64 ? DType::float64 : DType::float32, format.hidden};
}

WindowMap::WindowMap(const char* who, std::span<const SequencePart> parts,
                     std::span<const WindowRows> rows, int bits)
    : used_(parts.front().metadata->world_size), bits_(bits) {
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (const TensorFormat& format : parts[p].tensors) add(who, format, rows[p].tensor);
  }
  if (std::ranges::all_of(rows, [](const WindowRows& r) { return r.sums.empty(); })) return;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (const TensorFormat& format : parts[p].tensors) add(who, sum_format(format), rows[p].sums);
  }
}

void WindowMap::add(const char* who, const TensorFormat& format,
                    std::span<const std::int64_t> rows) {
  offsets_.push_back(used_);
  for (std::size_t r = 0; r < used_.size(); ++r) {
    std::int64_t bytes = 0;
    const bool overflows = __builtin_mul_overflow(rows[r], format.row_bytes(), &bytes);
    take(who, r, overflows ? std::numeric_limits<std::int64_t>::max() : bytes);
  }
}

void WindowMap::take(const char* who, std::size_t rank, std::int64_t bytes) {
  require(bytes < (std::int64_t{1} << bits_) - used_[rank] - alignment_bytes, who,
          ": the window of rank ", rank, " would need 2^", bits_, " bytes or more");
  used_[rank] += (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

std::int64_t WindowMap::add_stage(const char* who, std::span<const std::int64_t> size_bytes,
                                  std::int32_t rank) {
  const std::int64_t begin = used_[rank];
  for (std::size_t r = 0; r < used_.size(); ++r) take(who, r, size_bytes[r]);
  return begin;
}

std::int64_t WindowMap::largest() const { return *std::ranges::max_element(used_); }

}  // namespace waybill::detail
