#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "compile.h"
#include "waybill/core/error.h"

namespace waybill {
namespace detail {
namespace {

constexpr std::int64_t alignment_bytes = 256;

/// A copy engine needs a microsecond or two for a copy, in which it moves a megabyte; 16
/// multiprocessors that read, stage and write move half as much.
constexpr std::int64_t min_local_piece_bytes = std::int64_t{1} << 19;

/// With fewer bytes another queue costs more time than it saves.
constexpr std::int64_t min_local_bytes = std::int64_t{4} << 20;

/// Writes the entries of this rank as segments, and counts the chunks that they will be cut into.
class SegmentWriter {
 public:
  /// @param separate_local_copies dispatch: rows that stay on this rank go to plan.local_segments
  SegmentWriter(SequencePlan& plan, const WindowMap& windows, bool separate_local_copies)
      : plan_(plan), windows_(windows), separates_local_(separate_local_copies) {}

  /// The next part. @param local runs that are written as local segments, in order
  void add_part(const SequencePart& part, std::span<const RowMove> local) {
    const SparseMetadata& metadata = *part.metadata;
    num_tensors_ = static_cast<std::int32_t>(part.tensors.size());
    std::int64_t row = 0;
    std::int64_t local_end = 0;
    const std::size_t r = to_int(plan_.rank);
    for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
      const std::int64_t rows = metadata.seq_len[j];
      if (rows == 0) continue;
      if (!local.empty() && row == local.front().row) {
        append_local(plan_, windows_, local.front());
        local_end = row + local.front().rows;
        local = local.subspan(1);
      }
      if (row >= local_end) add_entry(metadata, j, row);
      row += rows;
    }
    first_tensor_ += num_tensors_;
  }

 private:
  using Copy = std::pair<std::int32_t, std::int64_t>;  ///< distance of its rank, first row there

  void add_entry(const SparseMetadata& metadata, std::int64_t entry, std::int64_t row) {
    const std::int64_t rows = metadata.seq_len[entry];
    copies_.clear();
    for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
      copies_.emplace_back(distance(to_int(plan_.rank), metadata.dst_rank[c], plan_.world_size),
                           metadata.dst_offset[c]);
    }
    std::span<const Copy> copies(copies_);
    if (plan_.operation == SequenceOperation::kv_gradient) {
      add_group(row, rows, copies);  // a sum needs all of them, in their order; none: zeros
      return;
    }
    if (copies_.size() > 1) std::ranges::stable_sort(copies_, {}, &Copy::first);
    while (separates_local_ && !copies.empty() && copies.back().first == plan_.world_size - 1) {
      append_local(plan_, windows_,
                   {.tensor = first_tensor_,
                    .num_tensors = num_tensors_,
                    .row = row,
                    .rows = rows,
                    .dst_rank = to_int(plan_.rank),
                    .dst_row = copies.back().second});
      copies = copies.first(copies.size() - 1);
    }
    for (std::size_t c = 0; c < copies.size(); c += max_addresses_sent) {
      add_group(row, rows,
                copies.subspan(c, std::min<std::size_t>(max_addresses_sent, copies.size() - c)));
    }
  }

  void add_group(std::int64_t row, std::int64_t rows, std::span<const Copy> copies) {
    const std::int32_t bucket = copies.empty() ? plan_.world_size - 1 : copies.front().first;
    const bool stays =
        plan_.operation == SequenceOperation::dispatch && bucket == plan_.world_size - 1;
    for (std::int32_t t = first_tensor_; t < first_tensor_ + num_tensors_; ++t) {
      const std::int64_t row_bytes = plan_.cuts[t].row_bytes;
      if (row_bytes == 0) continue;
      addresses_.clear();
      for (const auto& [rank_distance, copy_row] : copies) {
        const std::int32_t next = to_int(plan_.rank) + 1 + rank_distance;
        const std::int32_t rank = next < plan_.world_size ? next : next - plan_.world_size;
        addresses_.push_back(windows_.address(t, rank, copy_row));
        plan_.wire_bytes[rank] += rows * row_bytes;
      }
      std::int64_t& bucket_chunks = plan_.bucket_chunks[bucket];
      const std::int64_t chunks_before = plan_.num_chunks;
      RowSegment& segment = append_segment(plan_, t, row, rows, addresses_);
      segment.bucket = bucket;
      segment.first_chunk = static_cast<std::int32_t>(bucket_chunks);
      const std::int64_t chunks = plan_.num_chunks - chunks_before;
      bucket_chunks += chunks;
      if (!stays) plan_.num_wire_chunks += chunks;
    }
  }

  SequencePlan& plan_;
  const WindowMap& windows_;
  bool separates_local_;
  std::int32_t first_tensor_ = 0;
  std::int32_t num_tensors_ = 0;
  std::vector<Copy> copies_;
  std::vector<std::uint64_t> addresses_;
};

/// Adjacent rows of `rank` of which each has one copy, on the rank itself, adjacent in its window
/// too: their gradient is there already, and whole.
std::vector<RowMove> local_runs(const SparseMetadata& metadata, const RowMove& part, Rank rank) {
  std::vector<RowMove> runs;
  bool open = false;
  std::int64_t row = 0;
  const std::size_t r = to_int(rank);
  for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
    const std::int64_t rows = metadata.seq_len[j];
    if (rows == 0) continue;
    const std::int64_t copy = metadata.destination_begin(j);
    const bool stays =
        metadata.destination_end(j) - copy == 1 && metadata.dst_rank[copy] == to_int(rank);
    if (stays) {
      const std::int64_t dst_row = metadata.dst_offset[copy];
      if (!open || runs.back().dst_row + runs.back().rows != dst_row) {
        runs.push_back(part);
        runs.back().row = row;
        runs.back().dst_row = dst_row;
      }
      runs.back().rows += rows;
    }
    open = stays;
    row += rows;
  }
  return runs;
}

/// The runs of each part that are worth a copy of their own, in order: long ones, and only where
/// they are many bytes together. [parts]
std::vector<std::vector<RowMove>> long_local_runs(std::span<const SequencePart> parts, Rank rank) {
  std::vector<std::vector<RowMove>> all;
  std::int64_t total = 0;
  RowMove part_move{.dst_rank = to_int(rank)};
  for (const SequencePart& part : parts) {
    std::vector<RowMove>& runs = all.emplace_back();
    part_move.tensor += part_move.num_tensors;
    part_move.num_tensors = static_cast<std::int32_t>(part.tensors.size());
    const std::int64_t row_bytes = row_bytes_of(part);
    if (row_bytes == 0) continue;
    runs = local_runs(*part.metadata, part_move, rank);
    const std::int64_t min_bytes = min_local_piece_bytes * std::ssize(part.tensors);
    std::erase_if(runs, [&](const RowMove& run) { return run.rows * row_bytes < min_bytes; });
    for (const RowMove& run : runs) total += run.rows * row_bytes;
  }
  if (total >= min_local_bytes) return all;
  return std::vector<std::vector<RowMove>>(parts.size());
}

}  // namespace

std::int64_t row_bytes_of(const SequencePart& part) {
  std::int64_t bytes = 0;
  for (const TensorFormat& format : part.tensors) bytes += format.row_bytes();
  return bytes;
}

TensorFormat sum_format(const TensorFormat& format) {
  return {format.dtype == DType::float64 ? DType::float64 : DType::float32, format.hidden};
}

RowCut cut_rows(std::int64_t row_bytes, std::int64_t chunk_bytes) {
  if (row_bytes <= chunk_bytes) {
    const std::int64_t rows_each = chunk_bytes / std::max<std::int64_t>(1, row_bytes);
    return {row_bytes, static_cast<std::int32_t>(rows_each), static_cast<std::int32_t>(row_bytes),
            1};
  }
  return {row_bytes, 1, static_cast<std::int32_t>(chunk_bytes),
          static_cast<std::int32_t>((row_bytes + chunk_bytes - 1) / chunk_bytes)};
}

WindowMap::WindowMap(const char* who, std::span<const SequencePart> parts, const PartRows& rows,
                     const PartRows& sums, int bits)
    : used_(parts.front().metadata->world_size), bits_(bits) {
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (const TensorFormat& format : parts[p].tensors) add(who, format, rows[p]);
  }
  first_sum_ = offsets_.size();
  for (std::size_t p = 0; p < sums.size(); ++p) {
    for (const TensorFormat& format : parts[p].tensors) add(who, sum_format(format), sums[p]);
  }
}

void WindowMap::add(const char* who, const TensorFormat& format,
                    std::span<const std::int64_t> rows) {
  offsets_.push_back(used_);
  row_bytes_.push_back(format.row_bytes());
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

void WindowMap::write_offsets(SequencePlan& plan) const {
  for (const auto& offsets : offsets_) plan.window_offsets.push_back(offsets[to_int(plan.rank)]);
}

/// The segment is written where it stays: a copy would be read before it is in the cache.
RowSegment& append_segment(SequencePlan& plan, std::int32_t tensor, std::int64_t row,
                           std::int64_t rows, std::span<const std::uint64_t> addresses) {
  RowSegment& segment = plan.segments.emplace_back();
  segment.row = row;
  segment.rows = rows;
  segment.tensor = tensor;
  segment.first_address = static_cast<std::int32_t>(plan.num_addresses);
  segment.first_destination = static_cast<std::int32_t>(plan.segment_addresses.size());
  segment.num_destinations = static_cast<std::int32_t>(addresses.size());
  plan.segment_addresses.insert(plan.segment_addresses.end(), addresses.begin(), addresses.end());
  const RowCut& cut = plan.cuts[tensor];
  const std::int64_t chunks = (rows + cut.rows_each - 1) / cut.rows_each * cut.parts;
  plan.num_chunks += chunks;
  plan.num_addresses += chunks * std::ssize(addresses);
  return segment;
}

void append_local(SequencePlan& plan, const WindowMap& windows, const RowMove& move) {
  for (std::int32_t t = move.tensor; t < move.tensor + move.num_tensors; ++t) {
    const std::int64_t row_bytes = plan.cuts[t].row_bytes;
    if (row_bytes == 0) continue;
    plan.local_segments.push_back(
        {.row = move.row,
         .rows = move.rows,
         .tensor = t,
         .first_destination = static_cast<std::int32_t>(plan.segment_addresses.size()),
         .num_destinations = 1});
    plan.segment_addresses.push_back(windows.address(t, move.dst_rank, move.dst_row));
    plan.wire_bytes[move.dst_rank] += move.rows * row_bytes;
  }
}

/// A call to the copy engine pays for long pieces, and where `num_sms` multiprocessors do not have
/// time left by the links to move the rows themselves.
bool separates_local_rows(std::span<const SequencePart> parts, Rank rank, std::int32_t num_sms) {
  constexpr std::int64_t sms_of_links = 8;  // docs/performance/gpu_sequences.md
  std::int64_t bytes = 0;
  std::int64_t sent_bytes = 0;
  std::int64_t pieces = 0;
  const std::size_t r = to_int(rank);
  for (const SequencePart& part : parts) {
    const SparseMetadata& metadata = *part.metadata;
    std::int64_t rows = 0;
    std::int64_t sent = 0;
    std::int64_t runs = 0;
    std::int64_t next = -1;
    std::int64_t row = 0;
    std::int64_t next_row = -1;
    for (auto j = metadata.rank_offsets[r]; j < metadata.rank_offsets[r + 1]; ++j) {
      const std::int64_t len = metadata.seq_len[j];
      for (auto c = metadata.destination_begin(j); c < metadata.destination_end(j); ++c) {
        if (metadata.dst_rank[c] != to_int(rank)) {
          sent += len;
          continue;
        }
        rows += len;
        if (metadata.dst_offset[c] != next || row != next_row) ++runs;
        next = metadata.dst_offset[c] + len;
        next_row = row + len;
      }
      row += len;
    }
    bytes += rows * row_bytes_of(part);
    sent_bytes += sent * row_bytes_of(part);
    pieces += runs * std::ssize(part.tensors);
  }
  return bytes >= min_local_bytes && bytes >= pieces * min_local_piece_bytes &&
         static_cast<double>(num_sms) * static_cast<double>(sent_bytes) <
             static_cast<double>(sms_of_links) * static_cast<double>(sent_bytes + bytes);
}

void check_chunk_numbers(const SequencePlan& plan) {
  constexpr std::int64_t max_number = std::numeric_limits<std::int32_t>::max();
  require(plan.num_chunks <= max_number && plan.num_addresses <= max_number,
          "compile: ", plan.num_chunks, " chunks with ", plan.num_addresses,
          " remote addresses, expected fewer than 2^31 (larger chunk_bytes need fewer)");
}

void compile_direct(const char* who, std::span<const SequencePart> parts, const PartRows& needed,
                    const CompileOptions& options, SequencePlan& plan) {
  const WindowMap windows(who, parts, needed);
  const bool sends = plan.operation == SequenceOperation::dispatch;
  const bool separates = sends && options.separate_local_copies &&
                         separates_local_rows(parts, plan.rank, options.num_sms);
  const auto local = !sends && options.separate_local_copies
                         ? long_local_runs(parts, plan.rank)
                         : std::vector<std::vector<RowMove>>(parts.size());
  plan.bucket_chunks.assign(plan.world_size, 0);
  SegmentWriter writer(plan, windows, separates);
  for (std::size_t p = 0; p < parts.size(); ++p) writer.add_part(parts[p], local[p]);
  check_chunk_numbers(plan);
  windows.write_offsets(plan);
  plan.window_bytes = windows.largest();
}

std::vector<RowSegment> rows_to_stage(const SequencePlan& plan) {
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> local(plan.tensors.size());
  for (const RowSegment& segment : plan.local_segments) {
    const std::size_t t = segment.tensor;
    const auto offset = static_cast<std::int64_t>(
        plan.segment_addresses[segment.first_destination] & address_offset_mask);
    const std::int64_t row = (offset - plan.window_offsets[t]) / plan.cuts[t].row_bytes;
    local[t].emplace_back(row, row + segment.rows);
  }
  std::vector<RowSegment> staged;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    if (plan.tensors[t].row_bytes() == 0) continue;
    std::ranges::sort(local[t]);
    local[t].emplace_back(plan.window_rows[t], plan.window_rows[t]);
    std::int64_t next = 0;
    for (const auto& [begin, end] : local[t]) {
      if (begin > next) {
        staged.push_back(
            {.row = next, .rows = begin - next, .tensor = static_cast<std::int32_t>(t)});
      }
      next = std::max(next, end);
    }
  }
  return staged;
}

namespace {

/// Chunk k of the n of a bucket belongs at (k + 1/2) / n of the whole. As n is at most N, no two of
/// one bucket share a position of N, so sorting by position is counting. Chunks that stay (the last
/// bucket of a dispatch) come after all others.
/// @return bucket by bucket: where the chunk goes
std::vector<std::int32_t> interleaved(const SequencePlan& plan) {
  std::vector<std::int32_t> positions(plan.num_chunks);
  const std::int64_t total = plan.num_wire_chunks;
  std::vector<std::int32_t> before(total + 1);
  std::span<const std::int64_t> buckets(plan.bucket_chunks);
  if (total < plan.num_chunks) {
    buckets = buckets.first(buckets.size() - 1);
    std::iota(positions.begin() + total, positions.end(), static_cast<std::int32_t>(total));
  }
  const auto each = [&](const auto& visit) {
    std::int64_t idx = 0;
    for (const std::int64_t chunks : buckets) {
      if (chunks == 0) continue;
      const std::uint64_t step =
          (static_cast<std::uint64_t>(total) << 32) / static_cast<std::uint64_t>(chunks);
      std::uint64_t where = step / 2;
      for (std::int64_t k = 0; k < chunks; ++k, where += step) visit(idx++, where >> 32);
    }
  };
  each([&](std::int64_t, std::uint64_t where) { ++before[where + 1]; });
  for (std::size_t i = 1; i < before.size(); ++i) before[i] += before[i - 1];
  each([&](std::int64_t idx, std::uint64_t where) { positions[idx] = before[where]++; });
  return positions;
}

/// The address of a chunk that begins `offset` bytes after the first row of its segment, whose own
/// address is `address`. Sums on the way are wider than the rows.
std::uint64_t address_of(const SequencePlan& plan, const RowSegment& segment, std::uint64_t address,
                         std::int64_t offset) {
  if (plan.batches.empty() || (address & address_sum_bit) == 0)
    return address + static_cast<std::uint64_t>(offset);
  const std::int64_t sum_row = plan.cuts[segment.tensor + plan.tensors.size()].row_bytes;
  const std::int64_t row_bytes = plan.cuts[segment.tensor].row_bytes;
  return address + static_cast<std::uint64_t>(offset * (sum_row / row_bytes));
}

/// @param position of chunk k of the segment
template <class Position>
void expand_segment(SequencePlan& plan, const RowSegment& segment, Position&& position) {
  const RowCut& cut = plan.cuts[segment.tensor];
  std::int64_t address = segment.first_address;
  std::int64_t idx = 0;
  for (std::int64_t k = 0; k < segment.rows; k += cut.rows_each) {
    for (std::int64_t col = 0; col < cut.row_bytes; col += cut.part_bytes) {
      RowChunk& chunk = plan.chunks[position(idx++)];
      chunk.row = segment.row + k;
      chunk.rows =
          static_cast<std::int32_t>(std::min<std::int64_t>(cut.rows_each, segment.rows - k));
      chunk.tensor = segment.tensor;
      chunk.col_bytes = static_cast<std::int32_t>(col);
      chunk.part_bytes =
          static_cast<std::int32_t>(std::min<std::int64_t>(cut.part_bytes, cut.row_bytes - col));
      chunk.first_address = static_cast<std::int32_t>(address);
      chunk.num_addresses = segment.num_destinations;
      for (std::int32_t c = 0; c < segment.num_destinations; ++c) {
        plan.addresses[address++] =
            address_of(plan, segment, plan.segment_addresses[segment.first_destination + c],
                       k * cut.row_bytes + col);
      }
    }
  }
}

}  // namespace
}  // namespace detail

void expand_chunks(SequencePlan& plan) {
  plan.chunks.resize(plan.num_chunks);
  plan.addresses.resize(plan.num_addresses);
  if (!plan.batches.empty()) {
    for (const RowSegment& segment : plan.segments) {
      detail::expand_segment(plan, segment,
                             [&](std::int64_t k) { return segment.first_chunk + k; });
    }
    return;
  }
  const std::vector<std::int32_t> positions = detail::interleaved(plan);
  std::vector<std::int64_t> begin(plan.bucket_chunks.size());
  for (std::size_t b = 1; b < begin.size(); ++b)
    begin[b] = begin[b - 1] + plan.bucket_chunks[b - 1];
  for (const RowSegment& segment : plan.segments) {
    const std::int64_t first = begin[segment.bucket] + segment.first_chunk;
    detail::expand_segment(plan, segment, [&](std::int64_t k) { return positions[first + k]; });
  }
}

}  // namespace waybill
