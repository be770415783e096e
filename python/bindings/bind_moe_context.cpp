#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "moe_arrays.h"
#include "rank_world.h"
#include "waybill/experts/dispatch_combine_context.h"

namespace waybill::python {

namespace {

/// A context as Python holds it.
class RankContext {
 public:
  RankContext(std::shared_ptr<RankWorld> rank, const EPConfig& config, std::int64_t capacity)
      : rank_(std::move(rank)), context_(make(*rank_, config, capacity)) {}

  nb::tuple reallocate(std::int64_t rows) {
    std::vector<std::shared_ptr<void>> memory;  // taken before another thread can free it
    const DispatchOutputBuffers buffers = unlocked([&] {
      const RankWorld::Call call(*rank_, "reallocate_dispatch_output_buf");
      const DispatchOutputBuffers grown = context_.reallocate_dispatch_output_buf(rows);
      memory = context_.memory().dispatch_windows[0].memory;
      return grown;
    });
    const auto array = [&](const TensorView& view) {
      return array_over(view, rank_, {rank_, nullptr, memory});
    };
    return nb::make_tuple(array(buffers.rows), array(buffers.weights));
  }

  void finalize() {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "finalize", nullptr, RankWorld::Looks::no);
      context_.finalize();
    });
  }

  [[nodiscard]] std::int64_t capacity() const {
    const RankWorld::Call call(*rank_, "capacity", nullptr, RankWorld::Looks::no);
    return context_.capacity_rows();
  }

 private:
  static DispatchCombineContext make(RankWorld& rank, const EPConfig& config,
                                     std::int64_t capacity) {
    const RankWorld::Call call(rank, "DispatchCombineContext");
    return DispatchCombineContext::create(rank.world(), config, capacity);
  }

  std::shared_ptr<RankWorld> rank_;
  DispatchCombineContext context_;
};

class RankBarrier {
 public:
  RankBarrier(std::shared_ptr<RankWorld> rank, bool is_intra_node) : rank_(std::move(rank)) {
    const RankWorld::Call call(*rank_, "BarrierAllContext", &turn_);
    barrier_ = std::make_unique<BarrierAllContext>(rank_->world(), is_intra_node);
  }
  void barrier_all() {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "barrier_all", &turn_);
      barrier_->barrier_all();
    });
  }
  void finalize() {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "finalize", &turn_, RankWorld::Looks::no);
      barrier_->finalize();
    });
  }

 private:
  std::shared_ptr<RankWorld> rank_;
  CallTurn turn_;
  std::unique_ptr<BarrierAllContext> barrier_;
};

}  // namespace

void bind_moe_context(nb::module_& m) {
  nb::class_<RankContext>(m, "ExpertContext")
      .def("__init__",
           [](RankContext* self, const WorldHandle& world, const EPConfig& config,
              std::int64_t capacity) {
             unlocked([&] { new (self) RankContext(world.rank, config, capacity); });
           })
      .def("reallocate", &RankContext::reallocate)
      .def("finalize", &RankContext::finalize)
      .def_prop_ro("capacity", &RankContext::capacity);
  nb::class_<RankBarrier>(m, "ExpertBarrier")
      .def("__init__",
           [](RankBarrier* self, const WorldHandle& world, bool is_intra_node) {
             unlocked([&] { new (self) RankBarrier(world.rank, is_intra_node); });
           })
      .def("barrier_all", &RankBarrier::barrier_all)
      .def("finalize", &RankBarrier::finalize);
}

}  // namespace waybill::python
