#include <algorithm>
#include <cmath>

#include "balance.h"

namespace waybill::detail {

SlabCosts::SlabCosts(const PlannerOptions& options)
    : mask(options.mask),
      q_row(static_cast<double>(options.model.q_row_bytes())),
      kv_row(static_cast<double>(options.model.kv_row_bytes())),
      block_tokens(options.block_tokens),
      facts(options.hardware),
      tails(options.tails) {}

std::int64_t SlabCosts::grid(std::int64_t position, std::int64_t doc_len) const {
  const std::int64_t keys = mask.is_full() ? doc_len : position - mask.first_key(position - 1);
  std::int64_t step = block_tokens;
  while (step > 1 && static_cast<double>(step * keys) > fine_work) step = (step + 1) / 2;
  return step;
}

Slab SlabCosts::slab_down(Slab slab, std::int64_t work_limit) const {
  if (work(slab) <= work_limit) return slab;
  if (work_limit <= 0) return {slab.end, slab.end, slab.doc_len};
  // Keys of the first query go down with `begin`: from the area of a trapezoid, in doubles, then
  // put right on the grid.
  // The cost of a row besides its pairs counts as if the document began so many rows earlier.
  const auto area = static_cast<double>(std::max<std::int64_t>(0, work_limit - facts.shard_pairs));
  const auto e = static_cast<double>(slab.end);
  double begin = 0;
  const auto row = static_cast<double>(facts.row_pairs);
  const auto window = static_cast<double>(mask.window);
  if (mask.is_full()) {
    begin = std::max(0.0, e - area / (static_cast<double>(slab.doc_len) + row));
  } else if (mask.window > 0 && area <= (e - window) * (window + row)) {
    begin = e - area / (window + row);
  } else {
    const double ramp_end = mask.window > 0 ? std::min(e, window) : e;
    const double left = area - (mask.window > 0 ? (e - ramp_end) * (window + row) : 0);
    const double square = ramp_end * (ramp_end + 1 + 2 * row) - 2 * left + row * row;
    begin = std::max(0.0, std::sqrt(std::max(0.0, square)) - row);
  }
  const std::int64_t step = grid(slab.end, slab.doc_len);
  Slab part = slab;
  part.begin = static_cast<std::int64_t>(begin) / step * step;
  const auto is_too_much = [&] {
    return work({std::min(part.begin, part.end), part.end, part.doc_len}) > work_limit;
  };
  while (part.begin < slab.begin || is_too_much()) part.begin += step;
  part.begin = std::min(part.begin, part.end);
  return part;
}

// The end of the shortest slab from `begin` with about `work`.
std::int64_t SlabCosts::end_for(std::int64_t begin, double work_wanted,
                                std::int64_t doc_len) const {
  const auto row = static_cast<double>(facts.row_pairs);
  if (mask.is_full()) {
    const double keys = static_cast<double>(doc_len) + row;
    return begin + static_cast<std::int64_t>(work_wanted / keys) + 1;
  }
  const double b = static_cast<double>(begin) + row;
  const double window = static_cast<double>(mask.window) + row;
  const auto on_ramp = [&] {
    return static_cast<std::int64_t>(std::sqrt(b * b + 2 * work_wanted) - row) + 1;
  };
  if (mask.window == 0) return on_ramp();
  if (b >= window) return begin + static_cast<std::int64_t>(work_wanted / window) + 1;
  const double ramp = (window * window - b * b) / 2;
  if (work_wanted <= ramp) return on_ramp();
  return static_cast<std::int64_t>(window - row + (work_wanted - ramp) / window) + 1;
}

double SlabCosts::bytes_of(Slab region, double slab_work) const {
  const auto begin = static_cast<double>(region.begin);
  const auto end = static_cast<double>(region.end);
  const double num_slabs =
      std::max(1.0, static_cast<double>(work(region)) / std::max(1.0, slab_work));
  // The sum of the contexts of num_slabs slabs with equal work: by its integral.
  double rows = static_cast<double>(context(region));
  if (mask.is_full()) {
    rows *= num_slabs;
  } else if (mask.window > 0) {
    rows += (num_slabs - 1) * static_cast<double>(mask.window - 1);
  } else if (num_slabs > 1) {
    rows = num_slabs * 2.0 / 3.0 * (end * end + end * begin + begin * begin) / (end + begin) +
           (end - begin) / 2;
  }
  return q_row * (end - begin) + kv_row * rows;
}

Slab SlabCosts::cheapest_region(Slab piece, std::int64_t work_wanted, double slab_work) const {
  if (work(piece) <= work_wanted) return piece;
  const double wanted = static_cast<double>(work_wanted);
  const auto cost = [&](double begin) {
    const auto b = static_cast<std::int64_t>(begin);
    return bytes_of({b, end_for(b, wanted, piece.doc_len), piece.doc_len}, slab_work);
  };
  const std::int64_t tail_begin = slab_down(piece, work_wanted).begin;
  double low = static_cast<double>(piece.begin);
  double high = static_cast<double>(tail_begin);
  const double tail_cost = cost(high);
  // Where queries have the same number of keys, it matters little where the region begins.
  const bool is_even = mask.has_window() || mask.is_full() || tails;
  if (!is_even) {  // convex in begin: golden section without the gold
    for (int round = 0; round < 12 && high - low > 256; ++round) {
      const double a = low + (high - low) * 0.4;
      const double b = low + (high - low) * 0.6;
      if (cost(a) <= cost(b)) {
        high = b;
      } else {
        low = a;
      }
    }
  }
  const double best = (low + high) / 2;
  // A tail leaves one piece at home in place of two.
  if (is_even || cost(best) > 0.93 * tail_cost) {
    const std::int64_t step = grid(piece.end, piece.doc_len);
    Slab tail = piece;
    tail.begin = std::max(piece.begin, tail_begin / step * step);
    if (work(tail) < work_wanted) tail.begin = std::max(piece.begin, tail.begin - step);
    return tail;
  }
  const std::int64_t step = grid(static_cast<std::int64_t>(best), piece.doc_len);
  Slab region = piece;
  region.begin = std::max(piece.begin, static_cast<std::int64_t>(best) / step * step);
  const std::int64_t end = end_for(region.begin, wanted, piece.doc_len);
  const std::int64_t end_step = grid(end, piece.doc_len);
  region.end = std::min(piece.end, (end / end_step + 1) * end_step);
  return region;
}

}  // namespace waybill::detail
