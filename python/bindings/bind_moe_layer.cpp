#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "moe_arrays.h"
#include "rank_world.h"
#include "runtime/executor.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

/// A table of a dispatch, by the name that Triton-distributed gave it, where it did.
struct NamedTable {
  std::string_view name;
  ConstTensorView ExpertTableViews::*view;
};

constexpr NamedTable named_tables[] = {
    {"num_input_tokens_per_rank", &ExpertTableViews::num_input_tokens},
    {"send_reqs_recv_tensor", &ExpertTableViews::send_reqs},
    {"topk_indices_tensor", &ExpertTableViews::ids},
    {"token_dst_scatter_idx", &ExpertTableViews::dst_rows},
    {"skipped_token_mapping_indices", &ExpertTableViews::primary_rows},
    {"skipped_token_topk_mapping_indices", &ExpertTableViews::topk_slot_rows},
    {"recv_expert_counts", &ExpertTableViews::expert_counts},
    {"recv_expert_offsets", &ExpertTableViews::expert_offsets},
    {"recv_topk_indices", &ExpertTableViews::recv_topk},
    {"compact_to_grouped", &ExpertTableViews::compact_to_grouped},
    {"grouped_to_compact", &ExpertTableViews::grouped_to_compact},
    {"recv_tags", &ExpertTableViews::recv_tags},
    {"num_recv_tokens_per_rank", &ExpertTableViews::num_recv_rows},
    {"required_rows", &ExpertTableViews::required_rows},
    {"splits", &ExpertTableViews::splits},
    {"weights", &ExpertTableViews::weights},
};

/// What Python's descriptor holds.
struct LayoutHandle {
  std::shared_ptr<RankWorld> rank;
  std::shared_ptr<EPLayout> layout;

  std::shared_ptr<UsedLayout> used = nullptr;  ///< since the first table was asked for

  [[nodiscard]] nb::object table(const std::string& name, std::uintptr_t stream) {
    const auto* const found = std::ranges::find(named_tables, name, &NamedTable::name);
    if (found == std::end(named_tables)) throw nb::key_error(name.c_str());
    const ExpertTableViews views = [&] {
      const RankWorld::Call call(*rank, "EPLayout.tables");
      return layout->tables();
    }();
    if (used == nullptr) used = std::make_shared<UsedLayout>(layout, stream_from(stream));
    return array_over(views.*found->view, rank, {rank, used, {}});
  }
};

/// A layer as Python holds it: with its world, one call at a time.
class RankLayer {
 public:
  RankLayer(std::shared_ptr<RankWorld> rank, const EPConfig& config, const EPLayerOptions& options)
      : rank_(std::move(rank)) {
    const RankWorld::Call call(*rank_, "EPAll2AllLayer", &turn_);
    layer_ = std::make_unique<EPAll2AllLayer>(rank_->world(), config, options);
  }

  nb::tuple dispatch(const TensorArg& tokens, const OptionalTensor& ids,
                     const OptionalTensor& weights, const OptionalTensor& scales,
                     const OptionalTensor& positions, const LayoutHandle* layout,
                     std::uintptr_t stream, bool needs_gradients, bool weights_need_gradients,
                     bool of_backward, std::uint32_t origin) {
    ExpertDispatchInput input;
    input.tokens = view_from<ConstTensorView>(tokens);
    input.ids = view_or_none(ids);
    input.weights = view_or_none(weights);
    input.scales = view_or_none(scales);
    input.full_scatter_indices = view_or_none(positions);
    input.needs_gradients = needs_gradients;
    input.weights_need_gradients = weights_need_gradients;
    input.of_backward = of_backward;
    input.origin = origin;
    std::vector<std::shared_ptr<void>> memory;  // taken before another thread can free it
    EPDispatched got = unlocked([&] {
      const RankWorld::Call call(*rank_, "dispatch", &turn_);
      const Stream queue = stream_from(stream);
      rank_->meet("dispatch", queue);
      EPDispatched arrived = layout == nullptr ? layer_->dispatch(input, queue)
                                               : layer_->dispatch(input, *layout->layout, queue);
      rank_->meet("dispatch", queue);
      memory = memory_of(layer_->context().memory().dispatch_windows);
      return arrived;
    });
    const auto array = [&](const TensorView& view) {
      return array_over(view, rank_, {rank_, nullptr, memory});
    };
    return nb::make_tuple(array(got.rows), array(got.weights), array(got.scales),
                          LayoutHandle{rank_, std::move(got.layout)});
  }

  void combine(const TensorArg& rows, const LayoutHandle& layout, const TensorArg& output,
               bool weighted, const std::vector<TensorArg>& biases, std::uintptr_t stream,
               bool needs_gradients, bool of_backward, bool of_companion) {
    std::vector<ConstTensorView> bias_views;
    for (const TensorArg& bias : biases) bias_views.push_back(view_from<ConstTensorView>(bias));
    const ExpertCombineInput input{.rows = view_from<ConstTensorView>(rows),
                                   .options = {.weighted = weighted},
                                   .biases = bias_views,
                                   .output = view_from<TensorView>(output),
                                   .needs_gradients = needs_gradients,
                                   .of_backward = of_backward,
                                   .of_companion = of_companion};
    unlocked([&] {
      const RankWorld::Call call(*rank_, "combine", &turn_);
      rank_->meet("combine", stream_from(stream));
      layer_->combine(input, *layout.layout, stream_from(stream));
      rank_->meet("combine", stream_from(stream));
    });
  }

  void weigh_gradients(const TensorArg& gradients, const OptionalTensor& weights,
                       const OptionalTensor& rows, const LayoutHandle& layout,
                       const OptionalTensor& row_gradients, const OptionalTensor& weight_gradients,
                       std::uintptr_t stream) {
    ExpertGradientInput input;
    input.gradients = view_from<ConstTensorView>(gradients);
    input.weights = view_or_none(weights);
    input.rows = view_or_none(rows);
    if (row_gradients) input.row_gradients = view_from<TensorView>(*row_gradients);
    if (weight_gradients) input.weight_gradients = view_from<TensorView>(*weight_gradients);
    unlocked([&] {
      const RankWorld::Call call(*rank_, "weigh_gradients", &turn_);
      layer_->weigh_gradients(input, *layout.layout, stream_from(stream));
    });
  }

  void copy_rows(const TensorArg& from, const TensorArg& to, const LayoutHandle& layout,
                 std::uintptr_t stream) {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "copy_rows", &turn_);
      layer_->copy_rows(view_from<ConstTensorView>(from), view_from<TensorView>(to), *layout.layout,
                        stream_from(stream));
    });
  }

  /// Rows that windows of fixed size would have needed since the last time; 0: all did fit.
  std::int64_t take_overflow() {
    const RankWorld::Call call(*rank_, "check_overflow", &turn_);
    return layer_->overflow().rows;
  }

  bool combine_needs_gradients(const LayoutHandle& layout, bool mine, bool asks,
                               std::uintptr_t stream) {
    return unlocked([&] {
      const RankWorld::Call call(*rank_, "combine", &turn_);
      rank_->meet("combine", stream_from(stream));
      const bool needs = layer_->combine_needs_gradients(*layout.layout, mine, asks);
      rank_->meet("combine", stream_from(stream));
      return needs;
    });
  }

  void synchronize(std::uintptr_t stream) {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "synchronize", &turn_);
      layer_->synchronize(stream_from(stream));
    });
  }

  /// The same, but leaves an overflow to be asked for.
  void await_calls(std::uintptr_t stream) {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "dispatch", &turn_);
      rank_->world().executor().synchronize(stream_from(stream));
    });
  }

  void barrier(std::uintptr_t stream, bool intra_node_only) {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "ep_barrier_all", &turn_);
      rank_->meet("ep_barrier_all", stream_from(stream));
      layer_->ep_barrier_all(stream_from(stream), intra_node_only);
      rank_->meet("ep_barrier_all", stream_from(stream));
    });
  }

  void finalize() {
    unlocked([&] {
      const RankWorld::Call call(*rank_, "finalize", &turn_, RankWorld::Looks::no);
      layer_->finalize();
    });
  }

  [[nodiscard]] nb::object combine_input(std::int64_t rows, std::uintptr_t stream) {
    const RankWorld::Call call(*rank_, "combine_input", &turn_);
    const TensorView view = layer_->combine_input(rows, stream_from(stream));
    return array_over(view, rank_,
                      {rank_, nullptr, memory_of(layer_->context().memory().combine_windows)});
  }

  void check_overflow() {
    const RankWorld::Call call(*rank_, "check_overflow", &turn_);
    layer_->check_overflow();
  }
  [[nodiscard]] std::int64_t output_rows() const {
    const RankWorld::Call call(*rank_, "output_rows", &turn_, RankWorld::Looks::no);
    return layer_->output_rows();
  }

  /// Of the symmetric memory for rows on this rank.
  [[nodiscard]] std::int64_t memory_bytes() const {
    const RankWorld::Call call(*rank_, "memory_bytes", &turn_, RankWorld::Looks::no);
    const ExpertMemory& memory = layer_->context().memory();
    std::int64_t bytes = memory.workspace.size_bytes;
    for (const int parity : {0, 1}) {
      bytes += memory.dispatch_windows[parity].size_bytes;
      bytes += memory.combine_windows[parity].size_bytes;
      bytes += memory.receive_slabs[parity].size_bytes;
    }
    return bytes;
  }

 private:
  std::shared_ptr<RankWorld> rank_;
  mutable CallTurn turn_;
  std::unique_ptr<EPAll2AllLayer> layer_;
};

}  // namespace

void bind_moe_layer(nb::module_& m) {
  nb::class_<LayoutHandle>(m, "EPLayout")
      .def_prop_ro("num_tokens", [](const LayoutHandle& h) { return h.layout->num_tokens(); })
      .def_prop_ro("number", [](const LayoutHandle& h) { return h.layout->number(); })
      .def("num_recv_rows",
           [](const LayoutHandle& h) {
             return unlocked([&] {
               const RankWorld::Call call(*h.rank, "num_recv_rows");
               return h.layout->num_recv_rows();
             });
           })
      .def("table", &LayoutHandle::table);
  nb::class_<RankLayer>(m, "ExpertLayer")
      .def("__init__",
           [](RankLayer* self, const WorldHandle& world, const EPConfig& config,
              const EPDispatchOptions& dispatch, int num_sm, bool enable_local_combine,
              std::int64_t capacity, std::int64_t fixed_rows, std::int64_t max_per_expert,
              bool push_combine) {
             const EPLayerOptions options{.dispatch = dispatch,
                                          .num_sms = num_sm,
                                          .enable_local_combine = enable_local_combine,
                                          .capacity_factor = capacity,
                                          .fixed_rows = fixed_rows,
                                          .max_per_expert = max_per_expert,
                                          .push_combine = push_combine};
             unlocked([&] { new (self) RankLayer(world.rank, config, options); });
           })
      .def("dispatch", &RankLayer::dispatch, "tokens"_a, "ids"_a.none(), "weights"_a.none(),
           "scales"_a.none(), "positions"_a.none(), "layout"_a.none(), "stream"_a,
           "needs_gradients"_a, "weights_need_gradients"_a, "of_backward"_a, "origin"_a)
      .def("combine", &RankLayer::combine)
      .def("weigh_gradients", &RankLayer::weigh_gradients, "gradients"_a, "weights"_a.none(),
           "rows"_a.none(), "layout"_a, "row_gradients"_a.none(), "weight_gradients"_a.none(),
           "stream"_a)
      .def("copy_rows", &RankLayer::copy_rows)
      .def("take_overflow", &RankLayer::take_overflow)
      .def("combine_needs_gradients", &RankLayer::combine_needs_gradients)
      .def("combine_input", &RankLayer::combine_input)
      .def("synchronize", &RankLayer::synchronize)
      .def("await_calls", &RankLayer::await_calls)
      .def("barrier", &RankLayer::barrier)
      .def("finalize", &RankLayer::finalize)
      .def("check_overflow", &RankLayer::check_overflow)
      .def_prop_ro("memory_bytes", &RankLayer::memory_bytes)
      .def_prop_ro("output_rows", &RankLayer::output_rows);
}

}  // namespace waybill::python
