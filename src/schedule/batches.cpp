#include "batches.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "segments.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

std::int32_t distance(std::int32_t from, std::int32_t to, std::int32_t world_size) {
  const std::int32_t ahead = to - from - 1;
  return ahead < 0 ? ahead + world_size : ahead;
}

auto rows_of(const RowMove& move) { return std::tuple(move.tensor, move.row, move.rows); }

/// Puts groups into another order.
void reorder(std::vector<RowMove>& moves, std::vector<std::size_t>& groups,
             std::span<const std::size_t> order) {
  std::vector<RowMove> result;
  result.reserve(moves.size());
  std::vector<std::size_t> begins;
  for (const std::size_t g : order) {
    begins.push_back(result.size());
    for (std::size_t i = groups[g]; i < groups[g + 1]; ++i) result.push_back(moves[i]);
  }
  begins.push_back(result.size());
  moves = std::move(result);
  groups = std::move(begins);
}

}  // namespace

void BatchAppender::begin(BatchKind kind) {
  batch_ = {.kind = kind,
            .first_segment = static_cast<std::int32_t>(plan_.segments.size()),
            .first_wait = static_cast<std::int32_t>(plan_.waits.size()),
            .first_signal = static_cast<std::int32_t>(plan_.signals.size()),
            .num_addresses = -static_cast<std::int32_t>(plan_.segment_addresses.size()),
            .first_chunk = plan_.num_chunks};
}

void BatchAppender::add(RowSegment segment, std::span<const std::uint64_t> addresses) {
  const RowCut& cut = plan_.cuts[segment.tensor];
  segment.bucket = static_cast<std::int32_t>(plan_.batches.size());
  segment.first_chunk = static_cast<std::int32_t>(plan_.num_chunks);
  segment.first_address = static_cast<std::int32_t>(plan_.num_addresses);
  segment.first_destination = static_cast<std::int32_t>(plan_.segment_addresses.size());
  segment.num_destinations = static_cast<std::int32_t>(addresses.size());
  plan_.segments.push_back(segment);
  plan_.segment_addresses.insert(plan_.segment_addresses.end(), addresses.begin(), addresses.end());
  const std::int64_t chunks = (segment.rows + cut.rows_each - 1) / cut.rows_each * cut.parts;
  plan_.num_chunks += chunks;
  plan_.num_addresses += chunks * std::ssize(addresses);
}

bool BatchAppender::is_empty() const {
  return std::ssize(plan_.segments) == batch_.first_segment &&
         std::ssize(plan_.signals) == batch_.first_signal;
}

void BatchAppender::end() {
  if (is_empty()) return;
  batch_.num_segments = static_cast<std::int32_t>(plan_.segments.size()) - batch_.first_segment;
  batch_.num_waits = static_cast<std::int32_t>(plan_.waits.size()) - batch_.first_wait;
  batch_.num_signals = static_cast<std::int32_t>(plan_.signals.size()) - batch_.first_signal;
  batch_.num_addresses += static_cast<std::int32_t>(plan_.segment_addresses.size());
  batch_.num_chunks = plan_.num_chunks - batch_.first_chunk;
  plan_.batches.push_back(batch_);
}

BatchWriter::BatchWriter(SequencePlan& plan, const WindowMap& windows)
    : plan_(plan), windows_(windows), appender_(plan) {
  plan_.wire_bytes.assign(plan.world_size, 0);
}

std::uint64_t BatchWriter::address(std::int32_t tensor, std::int32_t rank, std::int64_t row) const {
  const std::int64_t offset = windows_.offset(tensor, rank) + row * plan_.cuts[tensor].row_bytes;
  const bool sums = tensor >= std::ssize(plan_.tensors);
  return static_cast<std::uint64_t>(rank) << address_rank_shift |
         static_cast<std::uint64_t>(offset) | (sums ? address_sum_bit : 0);
}

void BatchWriter::add(std::int32_t tensor, std::int64_t row, std::int64_t rows,
                      std::span<const std::uint64_t> addresses) {
  if (plan_.cuts[tensor].row_bytes == 0 || rows == 0) return;
  appender_.add({.row = row, .rows = rows, .tensor = tensor}, addresses);
}

void BatchWriter::add(std::span<const RowMove> moves) {
  const RowMove& first = moves.front();
  for (std::int32_t t = first.tensor; t < first.tensor + first.num_tensors; ++t) {
    addresses_.clear();
    for (const RowMove& move : moves) {
      // Where rows go no executor looks at what they are.
      addresses_.push_back(address(t, move.dst_rank, move.dst_row) & ~address_sum_bit);
      plan_.wire_bytes[move.dst_rank] += move.rows * plan_.cuts[t].row_bytes;
    }
    add(t, first.row, first.rows, addresses_);
  }
}

void BatchWriter::finish() const { check_chunk_numbers(plan_); }

std::vector<std::size_t> group_moves(std::vector<RowMove>& moves, std::int32_t rank,
                                     std::int32_t world_size) {
  std::vector<std::size_t> idx(moves.size());
  std::iota(idx.begin(), idx.end(), std::size_t{0});
  std::ranges::sort(idx, {}, [&](std::size_t i) {
    const RowMove& move = moves[i];
    return std::tuple(rows_of(move), distance(rank, move.dst_rank, world_size), i);
  });
  std::vector<RowMove> sorted;
  sorted.reserve(moves.size());
  std::vector<std::size_t> groups;
  std::vector<std::size_t> earliest;  // of each group
  for (const std::size_t i : idx) {
    const bool joins = !sorted.empty() && rows_of(sorted.back()) == rows_of(moves[i]) &&
                       sorted.size() - groups.back() < static_cast<std::size_t>(max_addresses_sent);
    if (!joins) {
      groups.push_back(sorted.size());
      earliest.push_back(i);
    }
    earliest.back() = std::min(earliest.back(), i);
    sorted.push_back(moves[i]);
  }
  groups.push_back(sorted.size());
  std::vector<std::size_t> order(earliest.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t g) { return earliest[g]; });
  moves = std::move(sorted);
  reorder(moves, groups, order);
  return groups;
}

void alternate_moves(std::vector<RowMove>& moves, std::vector<std::size_t>& groups,
                     const SequencePlan& plan, std::int64_t piece_bytes) {
  std::vector<RowMove> pieces;
  std::vector<std::size_t> begins;
  std::vector<std::int64_t> bytes;
  for (std::size_t g = 0; g + 1 < groups.size(); ++g) {
    const RowMove& first = moves[groups[g]];
    std::int64_t row_bytes = 0;
    for (std::int32_t t = first.tensor; t < first.tensor + first.num_tensors; ++t)
      row_bytes += plan.cuts[t].row_bytes;
    // Rows that stay block no link.
    const bool local = groups[g + 1] - groups[g] == 1 && first.dst_rank == to_int(plan.rank);
    const std::int64_t most =
        row_bytes == 0 ? std::max<std::int64_t>(1, first.rows)
                       : std::max<std::int64_t>(1, (local ? 16 : 1) * piece_bytes / row_bytes);
    for (std::int64_t begin = 0; begin < first.rows; begin += most) {
      begins.push_back(pieces.size());
      bytes.push_back(std::min(most, first.rows - begin) * row_bytes);
      for (std::size_t i = groups[g]; i < groups[g + 1]; ++i) {
        RowMove piece = moves[i];
        piece.row += begin;
        piece.dst_row += begin;
        piece.rows = std::min(most, first.rows - begin);
        pieces.push_back(piece);
      }
    }
  }
  begins.push_back(pieces.size());
  moves = std::move(pieces);
  groups = std::move(begins);
  std::vector<std::int64_t> total(plan.world_size);
  const auto bucket = [&](std::size_t g) {
    return distance(to_int(plan.rank), moves[groups[g]].dst_rank, plan.world_size);
  };
  std::vector<double> middle(bytes.size());
  for (std::size_t g = 0; g < bytes.size(); ++g) {
    middle[g] = static_cast<double>(total[bucket(g)]) + 0.5 * static_cast<double>(bytes[g]);
    total[bucket(g)] += bytes[g];
  }
  for (std::size_t g = 0; g < bytes.size(); ++g)
    middle[g] /= static_cast<double>(std::max<std::int64_t>(1, total[bucket(g)]));
  std::vector<std::size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t g) { return std::tuple(middle[g], bucket(g), g); });
  reorder(moves, groups, order);
}

}  // namespace waybill::detail
