#include "segments.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "waybill/core/error.h"

namespace waybill {
namespace detail {

RowCut cut_rows(std::int64_t row_bytes, std::int64_t chunk_bytes) {
  if (row_bytes <= chunk_bytes) {
    const std::int64_t rows_each = chunk_bytes / std::max<std::int64_t>(1, row_bytes);
    return {row_bytes, static_cast<std::int32_t>(rows_each), static_cast<std::int32_t>(row_bytes),
            1};
  }
  return {row_bytes, 1, static_cast<std::int32_t>(chunk_bytes),
          static_cast<std::int32_t>((row_bytes + chunk_bytes - 1) / chunk_bytes)};
}

SegmentWriter::SegmentWriter(SequencePlan& plan, const WindowMap& windows,
                             bool separate_local_copies)
    : plan_(plan), windows_(windows), separates_local_(separate_local_copies) {
  plan_.wire_bytes.assign(plan.world_size, 0);
  plan_.bucket_chunks.assign(plan.world_size, 0);
}

void SegmentWriter::begin_part(const SequencePart& part, std::int32_t first_tensor) {
  num_formats_ = std::ssize(part.tensors);
  first_tensor_ = first_tensor;
}

void SegmentWriter::read_copies(std::span<const std::int32_t> ranks,
                                std::span<const std::int64_t> offsets) {
  copies_.clear();
  const std::int32_t me = to_int(plan_.rank);
  for (std::size_t c = 0; c < ranks.size(); ++c) {
    const std::int32_t ahead = ranks[c] - me - 1;
    copies_.push_back({ahead < 0 ? ahead + plan_.world_size : ahead, ranks[c], offsets[c]});
  }
  if (plan_.operation == SequenceOperation::dispatch && copies_.size() > 1) {
    std::ranges::stable_sort(copies_, {}, &Copy::distance);
  }
}

void SegmentWriter::add_entry(std::int64_t row, std::int64_t rows,
                              std::span<const std::int32_t> ranks,
                              std::span<const std::int64_t> offsets) {
  if (rows == 0) return;
  read_copies(ranks, offsets);
  std::span<const Copy> copies(copies_);
  if (plan_.operation == SequenceOperation::kv_gradient) {
    add_group(row, rows, copies, false);  // a sum needs all of them, in their order; none: zeros
    return;
  }
  while (separates_local_ && !copies.empty() && copies.back().rank == to_int(plan_.rank)) {
    add_group(row, rows, copies.last(1), true);
    copies = copies.first(copies.size() - 1);
  }
  for (std::size_t c = 0; c < copies.size(); c += max_addresses_sent) {
    add_group(row, rows,
              copies.subspan(c, std::min<std::size_t>(max_addresses_sent, copies.size() - c)),
              false);
  }
}

void SegmentWriter::add_local(std::int64_t row, std::int64_t rows, std::int64_t window_row) {
  const std::int32_t me = to_int(plan_.rank);
  read_copies({&me, 1}, {&window_row, 1});
  add_group(row, rows, copies_, true);
}

void SegmentWriter::add_group(std::int64_t row, std::int64_t rows, std::span<const Copy> copies,
                              bool local) {
  const std::int32_t bucket = copies.empty() ? plan_.world_size - 1 : copies.front().distance;
  const bool stays =
      plan_.operation == SequenceOperation::dispatch && bucket == plan_.world_size - 1;
  for (std::int32_t t = first_tensor_; t < first_tensor_ + num_formats_; ++t) {
    const RowCut& cut = plan_.cuts[t];
    if (cut.row_bytes == 0) continue;
    std::int64_t& bucket_chunks = plan_.bucket_chunks[bucket];
    RowSegment& segment = (local ? plan_.local_segments : plan_.segments).emplace_back();
    segment = {.row = row,
               .rows = rows,
               .tensor = t,
               .bucket = bucket,
               .first_chunk = static_cast<std::int32_t>(bucket_chunks),
               .first_address = static_cast<std::int32_t>(plan_.num_addresses),
               .first_destination = static_cast<std::int32_t>(plan_.segment_addresses.size()),
               .num_destinations = static_cast<std::int32_t>(copies.size())};
    for (const Copy& copy : copies) {
      const std::int64_t offset = windows_.offset(t, copy.rank) + copy.row * cut.row_bytes;
      plan_.segment_addresses.push_back(static_cast<std::uint64_t>(copy.rank)
                                            << address_rank_shift |
                                        static_cast<std::uint64_t>(offset));
      plan_.wire_bytes[copy.rank] += rows * cut.row_bytes;
    }
    if (local) continue;
    const std::int64_t chunks = (rows + cut.rows_each - 1) / cut.rows_each * cut.parts;
    bucket_chunks += chunks;
    plan_.num_chunks += chunks;
    if (!stays) plan_.num_wire_chunks += chunks;
    plan_.num_addresses += chunks * std::ssize(copies);
  }
}

void check_chunk_numbers(const SequencePlan& plan) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(plan.num_chunks <= most && plan.num_addresses <= most, "compile: ", plan.num_chunks,
          " chunks with ", plan.num_addresses,
          " remote addresses, expected fewer than 2^31 (larger chunk_bytes need fewer)");
}

namespace {

/// Chunk k of the n of a bucket belongs at (k + 1/2) / n of the whole. As n is at most N, no two of
/// one bucket share a position of N, so sorting by position is counting. Chunks that stay (the last
/// bucket of a dispatch) are behind all others.
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

/// Bytes behind the first row of an address of a chunk that begins `offset` bytes behind the first
/// row of its segment. Sums on the way are wider than the rows.
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
