#include <algorithm>

#include "balance.h"

namespace waybill::detail {

SlabCosts::SlabCosts(const PlannerOptions& options)
    : mask(options.mask.in_chunk()),  // documents have prefixes of their own
      q_row(static_cast<double>(options.model.q_row_bytes())),
      kv_row(static_cast<double>(options.model.kv_row_bytes())),
      block_tokens(options.block_tokens),
      facts(options.hardware),
      tails(options.tails) {}

std::int64_t SlabCosts::grid(std::int64_t position, const Slab& of) const {
  const std::int64_t keys = mask_of(of).keys(position - 1, position, of.doc_len).rows();
  std::int64_t step = block_tokens;
  while (step > 1 && static_cast<double>(step * keys) > fine_work) step = (step + 1) / 2;
  return step;
}

Slab SlabCosts::slab_down(Slab slab, std::int64_t work_limit) const {
  if (work(slab) <= work_limit) return slab;
  if (work_limit <= 0) return slab.part(slab.end, slab.end);
  const auto area = static_cast<double>(std::max<std::int64_t>(0, work_limit - facts.shard_pairs));
  const double begin = mask_of(slab).begin_for(static_cast<double>(slab.end), area, slab.doc_len,
                                               static_cast<double>(facts.row_pairs));
  const std::int64_t step = grid(slab.end, slab);
  Slab part = slab;
  part.begin = static_cast<std::int64_t>(begin) / step * step;
  const auto is_too_much = [&] {
    return work(part.part(std::min(part.begin, part.end), part.end)) > work_limit;
  };
  while (part.begin < slab.begin || is_too_much()) part.begin += step;
  part.begin = std::min(part.begin, part.end);
  return part;
}

double SlabCosts::bytes_of(Slab region, double slab_work) const {
  const double num_slabs =
      std::max(1.0, static_cast<double>(work(region)) / std::max(1.0, slab_work));
  return q_row * static_cast<double>(region.rows()) +
         kv_row *
             mask_of(region).keys_of_parts({region.begin, region.end}, num_slabs, region.doc_len);
}

Slab SlabCosts::cheapest_region(Slab piece, std::int64_t work_wanted, double slab_work) const {
  if (work(piece) <= work_wanted) return piece;
  const AttentionMask its = mask_of(piece);
  const auto end_from = [&](std::int64_t begin) {
    return its.end_for(begin, static_cast<double>(work_wanted), piece.doc_len,
                       static_cast<double>(facts.row_pairs));
  };
  const auto cost = [&](double begin) {
    const auto b = static_cast<std::int64_t>(begin);
    return bytes_of(piece.part(b, end_from(b)), slab_work);
  };
  const std::int64_t tail_begin = slab_down(piece, work_wanted).begin;
  double low = static_cast<double>(piece.begin);
  double high = static_cast<double>(tail_begin);
  const double tail_cost = cost(high);
  // Where queries have the same number of keys, it matters little where the region begins.
  const bool is_even = mask.is_even() || tails;
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
    const std::int64_t step = grid(piece.end, piece);
    Slab tail = piece;
    tail.begin = std::max(piece.begin, tail_begin / step * step);
    if (work(tail) < work_wanted) tail.begin = std::max(piece.begin, tail.begin - step);
    return tail;
  }
  const std::int64_t step = grid(static_cast<std::int64_t>(best), piece);
  Slab region = piece;
  region.begin = std::max(piece.begin, static_cast<std::int64_t>(best) / step * step);
  const std::int64_t end = end_from(region.begin);
  const std::int64_t end_step = grid(end, piece);
  region.end = std::min(piece.end, (end / end_step + 1) * end_step);
  return region;
}

}  // namespace waybill::detail
