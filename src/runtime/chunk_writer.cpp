#include "chunk_writer.h"

#include <algorithm>
#include <limits>

#include "waybill/core/at.h"
#include "waybill/core/error.h"

namespace waybill::detail {

ChunkWriter::ChunkWriter(SequencePlan& plan, const WindowMap& windows, std::int64_t chunk_bytes)
    : plan_(plan),
      windows_(windows),
      chunk_bytes_(chunk_bytes),
      bucket_chunks_(at(plan.world_size)) {
  plan_.wire_bytes.assign(at(plan.world_size), 0);
}

void ChunkWriter::begin(Pass pass) {
  pass_ = pass;
  if (pass == Pass::write) interleave();
}

void ChunkWriter::begin_part(const SequencePart& part, std::int32_t first_tensor) {
  formats_ = part.tensors;
  first_tensor_ = first_tensor;
}

ChunkWriter::Cut ChunkWriter::cut_of(const TensorFormat& format) const {
  const std::int64_t row_bytes = format.row_bytes();
  if (row_bytes <= chunk_bytes_) {
    return {row_bytes, chunk_bytes_ / std::max<std::int64_t>(1, row_bytes), row_bytes, 1};
  }
  return {row_bytes, 1, chunk_bytes_, (row_bytes + chunk_bytes_ - 1) / chunk_bytes_};
}

void ChunkWriter::read_copies(std::span<const std::int32_t> ranks,
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

void ChunkWriter::add_line(std::int64_t row, std::int64_t rows, std::span<const std::int32_t> ranks,
                           std::span<const std::int64_t> offsets) {
  if (rows == 0) return;
  read_copies(ranks, offsets);
  const std::span<const Copy> copies(copies_);
  if (plan_.operation == SequenceOperation::kv_gradient) {
    add_group(row, rows, copies);  // a sum needs all of them, in their order; none: zeros
    return;
  }
  for (std::size_t c = 0; c < copies.size(); c += max_places_sent) {
    add_group(row, rows,
              copies.subspan(c, std::min<std::size_t>(max_places_sent, copies.size() - c)));
  }
}

void ChunkWriter::add_group(std::int64_t row, std::int64_t rows, std::span<const Copy> copies) {
  const auto bucket = at(copies.empty() ? plan_.world_size - 1 : copies.front().distance);
  for (std::size_t t = 0; t < formats_.size(); ++t) {
    const Cut cut = cut_of(formats_[t]);
    if (cut.row_bytes == 0) continue;
    if (pass_ == Pass::write) {
      write_chunks(row, rows, copies, at(first_tensor_) + t, cut);
      continue;
    }
    const std::int64_t chunks = (rows + cut.rows_each - 1) / cut.rows_each * cut.parts;
    bucket_chunks_[bucket] += chunks;
    num_places_ += chunks * std::ssize(copies);
    for (const Copy& copy : copies) plan_.wire_bytes[at(copy.rank)] += rows * cut.row_bytes;
  }
}

void ChunkWriter::write_chunks(std::int64_t row, std::int64_t rows, std::span<const Copy> copies,
                               std::size_t tensor, const Cut& cut) {
  const auto bucket = at(copies.empty() ? plan_.world_size - 1 : copies.front().distance);
  const std::span<const std::int64_t> windows = windows_.offsets(tensor);
  std::int64_t& next = next_[bucket];
  for (std::int64_t k = 0; k < rows; k += cut.rows_each) {
    for (std::int64_t col = 0; col < cut.row_bytes; col += cut.part_bytes) {
      RowChunk& chunk = plan_.chunks[at(positions_[at(next++)])];
      chunk.row = row + k;
      chunk.rows = static_cast<std::int32_t>(std::min(cut.rows_each, rows - k));
      chunk.tensor = static_cast<std::int32_t>(tensor);
      chunk.col_bytes = static_cast<std::int32_t>(col);
      chunk.part_bytes = static_cast<std::int32_t>(std::min(cut.part_bytes, cut.row_bytes - col));
      chunk.first_place = static_cast<std::int32_t>(num_places_);
      chunk.num_places = static_cast<std::int32_t>(copies.size());
      for (const Copy& copy : copies) {
        const std::int64_t offset = windows[at(copy.rank)] + (copy.row + k) * cut.row_bytes + col;
        plan_.places[at(num_places_++)] = static_cast<std::uint64_t>(copy.rank)
                                              << place_rank_shift |
                                          static_cast<std::uint64_t>(offset);
      }
    }
  }
}

/// Chunk k of the n of a bucket belongs at (k + 1/2) / n of the whole. As n is at most N, no two of
/// one bucket share a position of N, so sorting by position is counting.
void ChunkWriter::interleave() {
  std::int64_t total = 0;
  for (const std::int64_t chunks : bucket_chunks_) total += chunks;
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(total <= most && num_places_ <= most, "compile: ", total, " chunks with ", num_places_,
          " places, expected fewer than 2^31 (larger chunk_bytes make fewer)");
  plan_.chunks.resize(at(total));
  plan_.places.resize(at(num_places_));
  num_places_ = 0;
  positions_.resize(at(total));
  std::vector<std::int32_t> before(at(total + 1));
  constexpr int fraction_bits = 32;  // of positions, which are below 2^31
  std::int64_t* const first = bucket_chunks_.data();
  const auto each = [&](const auto& visit) {
    std::int64_t idx = 0;
    for (std::int64_t b = 0; b < plan_.world_size; ++b) {
      if (first[b] == 0) continue;
      const std::uint64_t step = (static_cast<std::uint64_t>(total) << fraction_bits) /
                                 static_cast<std::uint64_t>(first[b]);
      std::uint64_t where = step / 2;
      for (std::int64_t k = 0; k < first[b]; ++k, where += step)
        visit(idx++, where >> fraction_bits);
    }
  };
  each([&](std::int64_t, std::uint64_t where) { ++before[where + 1]; });
  for (std::size_t i = 1; i < before.size(); ++i) before[i] += before[i - 1];
  each([&](std::int64_t idx, std::uint64_t where) { positions_[at(idx)] = before[where]++; });
  next_.assign(at(plan_.world_size), 0);
  for (std::size_t b = 1; b < next_.size(); ++b) next_[b] = next_[b - 1] + bucket_chunks_[b - 1];
}

}  // namespace waybill::detail
