#include "view_checks.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int64_t max_bytes = std::int64_t{1} << 62;

struct Axis {
  std::int64_t extent;
  std::int64_t step_bytes;  ///< > 0: the direction does not matter for what is covered
};

/// What a non-empty view covers: an unbroken block, repeated along the other axes.
struct Footprint {
  std::uintptr_t begin;  ///< lowest address
  std::uintptr_t end;    ///< past the highest
  std::int64_t block_bytes;
  std::int64_t step_gcd_bytes;  ///< of the repeats; 0 without any
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
      axes.push_back({view.shape[i], std::abs(view.strides[i]) * element_bytes});
  }
  std::ranges::sort(axes, {}, &Axis::step_bytes);
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
  for (const Axis& axis : moving_axes(view)) {
    if (axis.step_bytes == 0) continue;
    if (axis.step_bytes == result.block_bytes && result.step_gcd_bytes == 0) {
      result.block_bytes *= axis.extent;
    } else {
      result.step_gcd_bytes = std::gcd(result.step_gcd_bytes, axis.step_bytes);
    }
  }
  return result;
}

/// One end of a job on the sweep over addresses.
struct Piece {
  Footprint footprint;
  bool is_output;
  std::size_t idx;
};

void check_pair(const char* who, std::span<const ConstTensorView> sources,
                std::span<const TensorView> outputs, const Piece& a, const Piece& b) {
  const Piece& output = a.is_output ? a : b;
  const Piece& other = a.is_output ? b : a;
  const ConstTensorView output_view = outputs[output.idx];
  const ConstTensorView other_view = other.is_output ? outputs[other.idx] : sources[other.idx];
  require(!may_share_memory(output_view, other_view), who, ": output ", output.idx, " of shape ",
          to_string(output_view.shape), " shares memory with ",
          other.is_output ? "output " : "source ", other.idx, " of shape ",
          to_string(other_view.shape), ", expected memory of its own");
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

bool is_injective(const ConstTensorView& view) {
  if (is_empty(view)) return true;
  std::int64_t reach = 0;  // of all axes with smaller steps
  for (const Axis& axis : moving_axes(view)) {
    if (axis.step_bytes <= reach) return false;
    reach += (axis.extent - 1) * axis.step_bytes;
  }
  return true;
}

bool may_share_memory(const ConstTensorView& a, const ConstTensorView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const Footprint fa = footprint_of(a);
  const Footprint fb = footprint_of(b);
  if (fa.end <= fb.begin || fb.end <= fa.begin) return false;
  // Both repeat in steps of a common divisor: apart when they keep to different parts of it.
  const std::int64_t step = std::gcd(fa.step_gcd_bytes, fb.step_gcd_bytes);
  if (step == 0) return true;
  const auto unsigned_step = static_cast<std::uintptr_t>(step);
  const std::uintptr_t ahead =
      fb.begin >= fa.begin
          ? (fb.begin - fa.begin) % unsigned_step
          : (unsigned_step - (fa.begin - fb.begin) % unsigned_step) % unsigned_step;
  const auto distance = static_cast<std::int64_t>(ahead);
  return distance < fa.block_bytes || distance + fb.block_bytes > step;
}

void check_memory(const char* who, std::span<const ConstTensorView> sources,
                  std::span<const TensorView> outputs) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (!is_empty(sources[i])) pieces.push_back({footprint_of(sources[i]), false, i});
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    require(is_injective(outputs[i]), who, ": output ", i, " has shape ",
            to_string(outputs[i].shape), " and strides ", to_string(outputs[i].strides),
            ", expected no two elements at one address");
    if (!is_empty(outputs[i])) pieces.push_back({footprint_of(outputs[i]), true, i});
  }
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.footprint.begin; });
  std::vector<const Piece*> open_sources;
  std::vector<const Piece*> open_outputs;
  for (const Piece& piece : pieces) {
    const auto is_over = [&](const Piece* open) {
      return open->footprint.end <= piece.footprint.begin;
    };
    std::erase_if(open_sources, is_over);
    std::erase_if(open_outputs, is_over);
    for (const Piece* open : open_outputs) check_pair(who, sources, outputs, piece, *open);
    if (piece.is_output) {
      for (const Piece* open : open_sources) check_pair(who, sources, outputs, piece, *open);
    }
    (piece.is_output ? open_outputs : open_sources).push_back(&piece);
  }
}

}  // namespace waybill::detail
