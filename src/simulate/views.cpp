#include "views.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t max_bytes = std::int64_t{1} << 62;

/// Step in bytes and extent. The step is > 0: the direction does not matter for what is covered.
using Axis = std::pair<std::int64_t, std::int64_t>;

/// The memory of a non-empty view: an unbroken block, repeated along the other axes.
struct Footprint {
  std::uintptr_t begin;  ///< lowest address
  std::uintptr_t end;    ///< past the highest
  std::int64_t block_bytes;
  std::int64_t step_gcd_bytes;  ///< the repeats' steps; 0 without any
};

bool is_empty(const ConstTensorView& view) {
  return std::ranges::any_of(view.shape, [](std::int64_t extent) { return extent == 0; });
}

/// Axes with more than one element, smallest step first.
std::vector<Axis> moving_axes(const ConstTensorView& view) {
  std::vector<Axis> axes;
  const std::int64_t element_bytes = dtype_bytes(view.dtype);
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] > 1)
      axes.emplace_back(std::abs(view.strides[i]) * element_bytes, view.shape[i]);
  }
  std::ranges::stable_sort(axes, {}, &Axis::first);
  return axes;
}

Footprint footprint_of(const ConstTensorView& view) {
  const std::int64_t element_bytes = dtype_bytes(view.dtype);
  std::int64_t below = 0;
  std::int64_t above = element_bytes;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    const std::int64_t reach = (view.shape[i] - 1) * view.strides[i] * element_bytes;
    (reach < 0 ? below : above) += reach;
  }
  Footprint result{};
  const auto first = reinterpret_cast<std::uintptr_t>(view.data);
  result.begin = first - static_cast<std::uintptr_t>(-below);
  result.end = first + static_cast<std::uintptr_t>(above);
  result.block_bytes = element_bytes;
  for (const auto& [step_bytes, extent] : moving_axes(view)) {
    if (step_bytes == 0) continue;
    if (step_bytes == result.block_bytes && result.step_gcd_bytes == 0) {
      result.block_bytes *= extent;
    } else {
      result.step_gcd_bytes = std::gcd(result.step_gcd_bytes, step_bytes);
    }
  }
  return result;
}

/// False when two elements may lie at one address.
bool is_injective(const ConstTensorView& view) {
  if (is_empty(view)) return true;
  std::int64_t reach = 0;  // along all axes with smaller steps
  for (const auto& [step_bytes, extent] : moving_axes(view)) {
    if (step_bytes <= reach) return false;
    reach += (extent - 1) * step_bytes;
  }
  return true;
}

/// False only when no byte belongs to both.
bool may_share_memory(const Footprint& fa, const Footprint& fb) {
  if (fa.end <= fb.begin || fb.end <= fa.begin) return false;
  // Both repeat in steps of a common divisor: apart when they keep to different parts of it.
  const std::int64_t step = std::gcd(fa.step_gcd_bytes, fb.step_gcd_bytes);
  if (step == 0) return true;
  const auto unsigned_step = static_cast<std::uintptr_t>(step);
  const std::uintptr_t gap =
      fb.begin >= fa.begin
          ? (fb.begin - fa.begin) % unsigned_step
          : (unsigned_step - (fa.begin - fb.begin) % unsigned_step) % unsigned_step;
  const auto distance = static_cast<std::int64_t>(gap);
  return distance < fa.block_bytes || distance + fb.block_bytes > step;
}

}  // namespace

void check_view(const char* who, const char* name, const ConstTensorView& view, std::int64_t ndim) {
  require(view.ndim() == ndim, who, ": ", name, " has shape ", to_string(view.shape), ", expected ",
          ndim, " dimensions");
  require(view.strides.size() == view.shape.size(), who, ": ", name, " has strides ",
          to_string(view.strides), ", expected ", ndim, " of them");
  (void)num_elements(view.shape, concat(who, ": ", name).c_str());
  if (is_empty(view)) return;
  require(view.data != nullptr, who, ": ", name, " of shape ", to_string(view.shape),
          " has no memory");
  std::int64_t reach_bytes = 0;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    std::int64_t reach = 0;
    if (view.shape[i] == 1) continue;  // its stride is never used
    const bool fits = view.strides[i] != std::numeric_limits<std::int64_t>::min() &&
                      !__builtin_mul_overflow(view.shape[i], std::abs(view.strides[i]), &reach) &&
                      !__builtin_mul_overflow(reach, dtype_bytes(view.dtype), &reach) &&
                      !__builtin_add_overflow(reach_bytes, reach, &reach_bytes) &&
                      reach_bytes <= max_bytes;
    require(fits, who, ": ", name, " has shape ", to_string(view.shape), " and strides ",
            to_string(view.strides), ", expected at most 2^62 bytes from end to end");
  }
}

void check_memory(const char* who, std::span<const ConstTensorView> sources,
                  std::span<const TensorView> outputs) {
  std::vector<ConstTensorView> views(sources.begin(), sources.end());
  views.insert(views.end(), outputs.begin(), outputs.end());
  const auto is_output = [&](std::size_t i) { return i >= sources.size(); };
  const auto number = [&](std::size_t i) { return is_output(i) ? i - sources.size() : i; };
  std::vector<Footprint> footprints(views.size());
  std::vector<std::size_t> by_begin;
  for (std::size_t i = 0; i < views.size(); ++i) {
    require(!is_output(i) || is_injective(views[i]), who, ": output ", number(i), " has shape ",
            to_string(views[i].shape), " and strides ", to_string(views[i].strides),
            ", expected no two elements at one address");
    if (is_empty(views[i])) continue;
    footprints[i] = footprint_of(views[i]);
    by_begin.push_back(i);
  }
  std::ranges::sort(by_begin, {}, [&](std::size_t i) { return footprints[i].begin; });
  const auto check_pair = [&](std::size_t a, std::size_t b) {
    const auto [output, other] = is_output(a) ? std::pair(a, b) : std::pair(b, a);
    require(!may_share_memory(footprints[a], footprints[b]), who, ": output ", number(output),
            " of shape ", to_string(views[output].shape), " shares memory with ",
            is_output(other) ? "output " : "source ", number(other), " of shape ",
            to_string(views[other].shape), ", expected memory of its own");
  };
  std::vector<std::size_t> open_sources;
  std::vector<std::size_t> open_outputs;
  for (const std::size_t i : by_begin) {
    const auto is_over = [&](std::size_t open) {
      return footprints[open].end <= footprints[i].begin;
    };
    std::erase_if(open_sources, is_over);
    std::erase_if(open_outputs, is_over);
    for (const std::size_t open : open_outputs) check_pair(i, open);
    if (is_output(i)) {
      for (const std::size_t open : open_sources) check_pair(i, open);
    }
    (is_output(i) ? open_outputs : open_sources).push_back(i);
  }
}

}  // namespace waybill::detail
