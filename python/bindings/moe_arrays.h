#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "experts/expert_memory.h"
#include "rank_world.h"
#include "waybill/experts/ep_all2all_layer.h"

// Tensors between Python and layers of experts.

namespace waybill::python {

namespace nb = nanobind;

/// A contiguous tensor in host or device memory: address, dtype, shape. The package has checked
/// that the memory is there.
using TensorArg = std::tuple<std::uintptr_t, std::string, std::vector<std::int64_t>>;
using OptionalTensor = std::optional<TensorArg>;

template <class View>
View view_from(const TensorArg& given) {
  const auto& [address, dtype, shape] = given;
  // The address is one that Python has of the caller's tensor.
  return View(reinterpret_cast<void*>(address),  // NOLINT(performance-no-int-to-ptr)
              dtype_from_name(dtype), Shape(shape.begin(), shape.end()));
}

inline ConstTensorView view_or_none(const OptionalTensor& given) {
  return given ? view_from<ConstTensorView>(*given) : ConstTensorView{};
}

/// A layout whose tables are tensors of the caller's. When the last one dies, work with them may
/// still be under way on the stream on which they were asked for.
struct UsedLayout {
  UsedLayout(std::shared_ptr<EPLayout> used, Stream on) : layout(std::move(used)), stream(on) {}
  UsedLayout(const UsedLayout&) = delete;
  UsedLayout& operator=(const UsedLayout&) = delete;
  ~UsedLayout() {
    try {
      layout->note_use(stream);
    } catch (...) {  // the device is lost: nobody will use the memory again
    }
  }

  std::shared_ptr<EPLayout> layout;
  Stream stream;
};

/// What an array over memory of a layer keeps.
struct Held {
  std::shared_ptr<RankWorld> rank;
  std::shared_ptr<UsedLayout> layout;
  std::vector<std::shared_ptr<void>> memory;
};

/// An array of integers of the dtype's size over a view: numpy's in host memory; for a GPU's an
/// object that speaks DLPack.
inline nb::object array_over(const ConstTensorView& view, const std::shared_ptr<RankWorld>& rank,
                             Held&& kept) {
  if (!is_given(view)) return nb::none();
  auto held = std::make_unique<Held>(std::move(kept));
  const nb::capsule owner(held.release(), [](void* pointer) noexcept {
    const std::unique_ptr<Held> last(static_cast<Held*>(pointer));
    last->rank->retire(std::move(last->memory));
  });
  const auto bits = static_cast<std::uint8_t>(dtype_bytes(view.dtype) * 8);
  const nb::dlpack::dtype dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int), bits, 1};
  const std::vector<std::size_t> extents(view.shape.begin(), view.shape.end());
  void* const data = const_cast<std::byte*>(view.data);  // NOLINT: tensors have no read-only form
  if (rank->device() < 0) {
    return nb::cast(
        nb::ndarray<nb::numpy>(data, extents.size(), extents.data(), owner, nullptr, dtype));
  }
  return nb::cast(nb::ndarray<>(data, extents.size(), extents.data(), owner, nullptr, dtype,
                                nb::device::cuda::value, rank->device()));
}

/// Both windows' memory.
inline std::vector<std::shared_ptr<void>> memory_of(const SymmetricBuffer (&windows)[2]) {
  std::vector<std::shared_ptr<void>> kept;
  for (const SymmetricBuffer& window : windows) {
    kept.insert(kept.end(), window.memory.begin(), window.memory.end());
  }
  return kept;
}

}  // namespace waybill::python
