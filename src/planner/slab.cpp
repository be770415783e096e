#include "slab.h"

#include <algorithm>
#include <cmath>

namespace waybill::detail {

SlabCosts::SlabCosts(const PlannerOptions& options, double mean_work)
    : mask(options.mask),
      q_row(static_cast<double>(options.model.q_row_bytes())),
      kv_row(static_cast<double>(options.model.kv_row_bytes())),
      block_tokens(options.block_tokens),
      fine_work(mean_work * (options.imbalance_target - 1) / 4) {}

std::int64_t SlabCosts::grid(std::int64_t position) const {
  const std::int64_t keys = position - mask.first_key(position - 1);
  std::int64_t step = block_tokens;
  while (step > 1 && static_cast<double>(step * keys) > fine_work) step = (step + 1) / 2;
  return step;
}

Slab SlabCosts::slab_down(std::int64_t lowest, std::int64_t end, std::int64_t work_limit) const {
  if (work({lowest, end}) <= work_limit) return {lowest, end};
  // Keys of the first query go down with `begin`: from the area of a trapezoid, in doubles, then
  // put right on the grid.
  const double area = static_cast<double>(work_limit);
  const double e = static_cast<double>(end);
  double begin = 0;
  const double window = static_cast<double>(mask.window);
  if (mask.window > 0 && area <= (e - window) * window) {
    begin = e - area / window;
  } else {
    const double ramp_end = mask.window > 0 ? std::min(e, window) : e;
    const double left = area - (mask.window > 0 ? (e - ramp_end) * window : 0);
    begin = std::sqrt(std::max(0.0, ramp_end * (ramp_end + 1) - 2 * left));
  }
  const std::int64_t step = grid(end);
  std::int64_t cut = static_cast<std::int64_t>(begin) / step * step;
  while (cut < lowest || work({std::min(cut, end), end}) > work_limit) cut += step;
  return {std::min(cut, end), end};
}

// The end of the shortest slab from `begin` with about `work`.
std::int64_t SlabCosts::end_for(std::int64_t begin, double work_wanted) const {
  const double b = static_cast<double>(begin);
  const double window = static_cast<double>(mask.window);
  if (mask.window == 0) return static_cast<std::int64_t>(std::sqrt(b * b + 2 * work_wanted)) + 1;
  if (b >= window) return begin + static_cast<std::int64_t>(work_wanted / window) + 1;
  const double ramp = (window * window - b * b) / 2;
  if (work_wanted <= ramp) return static_cast<std::int64_t>(std::sqrt(b * b + 2 * work_wanted)) + 1;
  return static_cast<std::int64_t>(window + (work_wanted - ramp) / window) + 1;
}

Slab SlabCosts::slab_up(std::int64_t begin, std::int64_t highest, std::int64_t work_limit) const {
  if (work({begin, highest}) <= work_limit) return {begin, highest};
  const std::int64_t near = end_for(begin, static_cast<double>(work_limit));
  const std::int64_t step = grid(std::min(near, highest));
  std::int64_t cut = std::min(near / step * step, highest);
  while (cut > begin && work({begin, cut}) > work_limit) cut -= step;
  return {begin, std::max(begin, cut)};
}

double SlabCosts::bytes_of(Slab region, double slab_work) const {
  const auto begin = static_cast<double>(region.begin);
  const auto end = static_cast<double>(region.end);
  const double num_slabs =
      std::max(1.0, static_cast<double>(work(region)) / std::max(1.0, slab_work));
  // The sum of the contexts of num_slabs slabs with equal work: by its integral.
  double rows = static_cast<double>(context(region));
  if (mask.window > 0) {
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
    return bytes_of({b, end_for(b, wanted)}, slab_work);
  };
  const std::int64_t tail_begin = slab_down(piece.begin, piece.end, work_wanted).begin;
  double low = static_cast<double>(piece.begin);
  double high = static_cast<double>(tail_begin);
  const double tail_cost = cost(high);
  if (mask.window == 0) {  // convex in begin: golden section without the gold
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
  if (mask.window > 0 || cost(best) > 0.93 * tail_cost) {
    const std::int64_t step = grid(piece.end);
    const std::int64_t begin = std::max(piece.begin, tail_begin / step * step);
    return {work({begin, piece.end}) < work_wanted ? std::max(piece.begin, begin - step) : begin,
            piece.end};
  }
  const std::int64_t step = grid(static_cast<std::int64_t>(best));
  Slab region{static_cast<std::int64_t>(best) / step * step, 0};
  region.begin = std::max(piece.begin, region.begin);
  const std::int64_t end_step = grid(end_for(region.begin, wanted));
  region.end = std::min(piece.end, (end_for(region.begin, wanted) / end_step + 1) * end_step);
  return region;
}

}  // namespace waybill::detail
