#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "experts/expert_memory.h"
#include "rank_world.h"
#include "runtime/executor.h"
#include "waybill/experts/copy_store.h"
#include "waybill/experts/dispatch_combine_context.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

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

ConstTensorView view_or_none(const OptionalTensor& given) {
  return given ? view_from<ConstTensorView>(*given) : ConstTensorView{};
}

/// The owners of both windows' memory.
std::vector<std::shared_ptr<void>> memory_of(const SymmetricBuffer (&windows)[2]) {
  std::vector<std::shared_ptr<void>> kept;
  for (const SymmetricBuffer& window : windows) {
    kept.insert(kept.end(), window.memory.begin(), window.memory.end());
  }
  return kept;
}

/// A descriptor as Python holds it.
struct LayoutHandle {
  std::shared_ptr<RankWorld> rank;
  std::shared_ptr<EPLayout> layout;
  std::shared_ptr<void> used = nullptr;  ///< since the first table was asked for
};

/// Held by tables, which are tensors of the caller's. When the last one dies, work with them may
/// still be under way on the stream on which they were asked for.
std::shared_ptr<void> used_layout(const std::shared_ptr<EPLayout>& layout, Stream stream) {
  return {layout.get(), [layout, stream](void* /*layout*/) noexcept {
            try {
              layout->note_use(stream);
            } catch (...) {  // the device is lost: nobody will use the memory again
            }
          }};
}

/// Tables of a dispatch, by the names that Triton-distributed gave them, where it did.
constexpr std::pair<std::string_view, ConstTensorView ExpertTableViews::*> named_tables[] = {
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
    {"all_slot_experts", &ExpertTableViews::slot_experts},
    {"all_slot_quotas", &ExpertTableViews::slot_quotas},
    {"weights", &ExpertTableViews::weights},
};

nb::object table_py(LayoutHandle& handle, std::string_view name, std::uintptr_t stream) {
  const auto* const found =
      std::ranges::find_if(named_tables, [&](const auto& table) { return table.first == name; });
  if (found == std::end(named_tables)) throw nb::key_error(std::string(name).c_str());
  const ExpertTableViews views = call(*handle.rank, nullptr, "EPLayout.tables", std::nullopt,
                                      [&] { return handle.layout->tables(); });
  if (handle.used == nullptr) handle.used = used_layout(handle.layout, stream_from(stream));
  return array_over(views.*found->second, *handle.rank, owner_of(handle.rank, {}, handle.used));
}

using RankLayer = OnRank<EPAll2AllLayer>;

nb::tuple dispatch_tokens_py(RankLayer& layer, const TensorArg& tokens, const OptionalTensor& ids,
                             const OptionalTensor& weights, const OptionalTensor& scales,
                             const OptionalTensor& positions, const LayoutHandle* layout,
                             std::uintptr_t stream, bool needs_gradients,
                             bool weights_need_gradients, bool of_backward, std::uint32_t origin,
                             const LayoutHandle* present) {
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
  input.present = present == nullptr ? nullptr : present->layout.get();
  const Stream queue = stream_from(stream);
  const auto send = [&](EPAll2AllLayer& given) {
    EPDispatched arrived = layout == nullptr ? given.dispatch(input, queue)
                                             : given.dispatch(input, *layout->layout, queue);
    // Taken before another thread can free it.
    return std::pair(std::move(arrived), memory_of(given.context().memory().dispatch_windows));
  };
  auto [got, memory] = layer.call("dispatch", send, queue);
  const nb::capsule owner = owner_of(layer.rank(), std::move(memory));
  const auto array = [&](const TensorView& view) { return array_over(view, *layer.rank(), owner); };
  return nb::make_tuple(array(got.rows), array(got.weights), array(got.scales),
                        LayoutHandle{layer.rank(), std::move(got.layout)});
}

void combine_rows_py(RankLayer& layer, const TensorArg& rows, const LayoutHandle& layout,
                     const TensorArg& output, bool weighted, const std::vector<TensorArg>& biases,
                     std::uintptr_t stream, bool needs_gradients, bool of_backward,
                     bool of_companion) {
  std::vector<ConstTensorView> bias_views;
  for (const TensorArg& bias : biases) bias_views.push_back(view_from<ConstTensorView>(bias));
  const ExpertCombineInput input{.rows = view_from<ConstTensorView>(rows),
                                 .options = {.weighted = weighted},
                                 .biases = bias_views,
                                 .output = view_from<TensorView>(output),
                                 .needs_gradients = needs_gradients,
                                 .of_backward = of_backward,
                                 .of_companion = of_companion};
  const Stream queue = stream_from(stream);
  const auto sum = [&](EPAll2AllLayer& given) { given.combine(input, *layout.layout, queue); };
  layer.call("combine", sum, queue);
}

bool combine_needs_gradients_py(RankLayer& layer, const LayoutHandle& layout, bool mine, bool asks,
                                std::uintptr_t stream) {
  const auto ask = [&](EPAll2AllLayer& given) {
    return given.combine_needs_gradients(*layout.layout, mine, asks);
  };
  return layer.call("combine", ask, stream_from(stream));
}

void weigh_gradients_py(RankLayer& layer, const TensorArg& gradients, const OptionalTensor& weights,
                        const OptionalTensor& rows, const LayoutHandle& layout,
                        const OptionalTensor& row_gradients, const OptionalTensor& weight_gradients,
                        std::uintptr_t stream) {
  ExpertGradientInput input;
  input.gradients = view_from<ConstTensorView>(gradients);
  input.weights = view_or_none(weights);
  input.rows = view_or_none(rows);
  if (row_gradients) input.row_gradients = view_from<TensorView>(*row_gradients);
  if (weight_gradients) input.weight_gradients = view_from<TensorView>(*weight_gradients);
  layer.call("weigh_gradients", [&](EPAll2AllLayer& given) {
    given.weigh_gradients(input, *layout.layout, stream_from(stream));
  });
}

void copy_rows_py(RankLayer& layer, const TensorArg& from, const TensorArg& to,
                  const LayoutHandle& layout, std::uintptr_t stream) {
  layer.call("copy_rows", [&](EPAll2AllLayer& given) {
    given.copy_rows(view_from<ConstTensorView>(from), view_from<TensorView>(to), *layout.layout,
                    stream_from(stream));
  });
}

nb::object combine_input_py(RankLayer& layer, std::int64_t rows, std::uintptr_t stream) {
  auto [view, memory] = layer.call("combine_input", [&](EPAll2AllLayer& given) {
    const TensorView place = given.combine_input(rows, stream_from(stream));
    return std::pair(place, memory_of(given.context().memory().combine_windows));
  });
  return array_over(view, *layer.rank(), owner_of(layer.rank(), std::move(memory)));
}

void barrier_py(RankLayer& layer, std::uintptr_t stream, bool intra_node_only) {
  const Stream queue = stream_from(stream);
  const auto barrier = [&](EPAll2AllLayer& given) { given.ep_barrier_all(queue, intra_node_only); };
  layer.call("ep_barrier_all", barrier, queue);
}

/// Bytes of the symmetric memory for rows on this rank.
std::int64_t memory_bytes_py(RankLayer& layer) {
  return layer.call_always("memory_bytes", [](const EPAll2AllLayer& given) {
    const ExpertMemory& memory = given.context().memory();
    std::int64_t bytes = memory.workspace.size_bytes;
    for (const int parity : {0, 1}) {
      bytes += memory.dispatch_windows[parity].size_bytes;
      bytes += memory.combine_windows[parity].size_bytes;
    }
    return bytes;
  });
}

void bind_layer(nb::module_& m) {
  nb::class_<EPLayerOptions>(m, "LayerOptions");
  m.def(
      "layer_options",
      [](const EPDispatchOptions& dispatch, int num_sm, bool enable_local_combine,
         std::int64_t capacity, std::int64_t fixed_rows, std::int64_t max_per_expert) {
        return EPLayerOptions{.dispatch = dispatch,
                              .num_sms = num_sm,
                              .enable_local_combine = enable_local_combine,
                              .capacity_factor = capacity,
                              .fixed_rows = fixed_rows,
                              .max_per_expert = max_per_expert};
      },
      "dispatch"_a, "num_sm"_a, "enable_local_combine"_a, "capacity"_a, "fixed_rows"_a,
      "max_per_expert"_a);
  nb::class_<RankLayer>(m, "ExpertLayer")
      .def("__init__",
           [](RankLayer* self, const WorldHandle& world, const EPConfig& config,
              const EPLayerOptions& options) {
             new (self) RankLayer(world, "EPAll2AllLayer", [&](const World& ranks) {
               return EPAll2AllLayer(ranks, config, options);
             });
           })
      .def("dispatch", dispatch_tokens_py, "tokens"_a, "ids"_a.none(), "weights"_a.none(),
           "scales"_a.none(), "positions"_a.none(), "layout"_a.none(), "stream"_a,
           "needs_gradients"_a, "weights_need_gradients"_a, "of_backward"_a, "origin"_a,
           "present"_a.none())
      .def("combine", combine_rows_py, "rows"_a, "layout"_a, "output"_a, "weighted"_a, "biases"_a,
           "stream"_a, "needs_gradients"_a, "of_backward"_a, "of_companion"_a)
      .def("weigh_gradients", weigh_gradients_py, "gradients"_a, "weights"_a.none(),
           "rows"_a.none(), "layout"_a, "row_gradients"_a.none(), "weight_gradients"_a.none(),
           "stream"_a)
      .def("copy_rows", copy_rows_py, "rows"_a, "output"_a, "layout"_a, "stream"_a)
      .def("combine_needs_gradients", combine_needs_gradients_py, "layout"_a, "mine"_a, "asks"_a,
           "stream"_a)
      .def("combine_input", combine_input_py, "rows"_a, "stream"_a)
      .def("barrier", barrier_py, "stream"_a, "intra_node_only"_a)
      .def(
          "synchronize",
          [](RankLayer& layer, std::uintptr_t stream) {
            layer.call("synchronize",
                       [&](EPAll2AllLayer& given) { given.synchronize(stream_from(stream)); });
          },
          "stream"_a)
      .def(
          "await_calls",  // leaves an overflow to be asked for
          [](RankLayer& layer, std::uintptr_t stream) {
            layer.call("dispatch", [&](EPAll2AllLayer& /*given*/) {
              layer.rank()->world().executor().synchronize(stream_from(stream));
            });
          },
          "stream"_a)
      .def("take_overflow",  // rows that windows of fixed size needed since the last time; 0: none
           [](RankLayer& layer) {
             return layer.call("check_overflow",
                               [](EPAll2AllLayer& given) { return given.overflow().rows; });
           })
      .def("check_overflow",
           [](RankLayer& layer) { layer.call("check_overflow", &EPAll2AllLayer::check_overflow); })
      .def("finalize",
           [](RankLayer& layer) { layer.call_always("finalize", &EPAll2AllLayer::finalize); })
      .def_prop_ro("memory_bytes", memory_bytes_py)
      .def_prop_ro("output_rows", [](RankLayer& layer) {
        return layer.call_always("output_rows", &EPAll2AllLayer::output_rows);
      });
}

using RankContext = OnRank<DispatchCombineContext>;

nb::tuple reallocate_py(RankContext& context, std::int64_t rows) {
  auto [buffers, memory] =
      context.call("reallocate_dispatch_output_buf", [&](DispatchCombineContext& given) {
        const DispatchOutputBuffers grown = given.reallocate_dispatch_output_buf(rows);
        return std::pair(grown, given.memory().dispatch_windows[0].memory);
      });
  const nb::capsule owner = owner_of(context.rank(), std::move(memory));
  return nb::make_tuple(array_over(buffers.rows, *context.rank(), owner),
                        array_over(buffers.weights, *context.rank(), owner));
}

void bind_contexts(nb::module_& m) {
  nb::class_<RankContext>(m, "ExpertContext")
      .def("__init__",
           [](RankContext* self, const WorldHandle& world, const EPConfig& config,
              std::int64_t capacity) {
             new (self) RankContext(world, "DispatchCombineContext", [&](const World& ranks) {
               return DispatchCombineContext::create(ranks, config, capacity);
             });
           })
      .def("reallocate", reallocate_py, "rows"_a)
      .def("finalize",
           [](RankContext& context) {
             context.call_always("finalize", &DispatchCombineContext::finalize);
           })
      .def_prop_ro("capacity", [](RankContext& context) {
        return context.call_always("capacity", &DispatchCombineContext::capacity_rows);
      });
  using RankBarrier = OnRank<BarrierAllContext>;
  nb::class_<RankBarrier>(m, "ExpertBarrier")
      .def("__init__",
           [](RankBarrier* self, const WorldHandle& world, bool is_intra_node) {
             new (self) RankBarrier(world, "BarrierAllContext", [&](const World& ranks) {
               return BarrierAllContext(ranks, is_intra_node);
             });
           })
      .def("barrier_all",
           [](RankBarrier& barrier) {
             barrier.call("barrier_all", [](BarrierAllContext& b) { b.barrier_all(); });
           })
      .def("finalize", [](RankBarrier& barrier) {
        barrier.call_always("finalize", &BarrierAllContext::finalize);
      });
}

/// Tensors of an expert: (elements, dtype).
using PartArgs = std::vector<std::pair<std::int64_t, std::string>>;
using AddressArgs = std::vector<std::uintptr_t>;
using RankCopies = OnRank<CopyExchange>;

std::vector<ExpertPart> parts_from(const PartArgs& parts) {
  std::vector<ExpertPart> sizes;
  for (const auto& [elements, dtype] : parts) sizes.push_back({elements, dtype_from_name(dtype)});
  return sizes;
}

/// Those that Python has of the caller's tensors.
std::vector<std::byte*> pointers_from(const AddressArgs& addresses) {
  std::vector<std::byte*> tensors;
  for (const std::uintptr_t address : addresses) {
    tensors.push_back(reinterpret_cast<std::byte*>(address));  // NOLINT(performance-no-int-to-ptr)
  }
  return tensors;
}

/// @param move fetch_weights or add_gradients
void move_copies_py(RankCopies& exchange, const char* who,
                    void (CopyExchange::*move)(const ExpertCopyCall&), const IndexArray& slots,
                    std::int32_t num_experts, const PartArgs& parts, const AddressArgs& home,
                    const AddressArgs& copies, std::uint64_t owner) {
  const std::vector<std::int32_t> experts = int32s_from(slots, who);
  const auto sizes = parts_from(parts);
  const auto to_home = pointers_from(home);
  const auto to_copies = pointers_from(copies);
  exchange.call(who, [&](CopyExchange& given) {
    (given.*move)({.slots = {exchange.rank()->world().world_size(), num_experts, experts},
                   .parts = sizes,
                   .home = to_home,
                   .copies = to_copies,
                   .owner = owner});
  });
}

void bind_copies(nb::module_& m) {
  nb::class_<RankCopies> type(m, "CopyExchange");
  type.def("__init__", [](RankCopies* self, const WorldHandle& world) {
    new (self)
        RankCopies(world, "CopyExchange", [](const World& ranks) { return CopyExchange(ranks); });
  });
  const auto add = [&](const char* who, void (CopyExchange::*move)(const ExpertCopyCall&)) {
    type.def(
        who,
        [who, move](RankCopies& exchange, const IndexArray& slots, std::int32_t num_experts,
                    const PartArgs& parts, const AddressArgs& home, const AddressArgs& copies,
                    std::uint64_t owner) {
          move_copies_py(exchange, who, move, slots, num_experts, parts, home, copies, owner);
        },
        "slots"_a, "num_experts"_a, "parts"_a, "home"_a, "copies"_a, "owner"_a);
  };
  add("fetch_weights", &CopyExchange::fetch_weights);
  add("add_gradients", &CopyExchange::add_gradients);
  type.def(
          "exchange_versions",
          [](RankCopies& exchange, std::int64_t mine, std::uint64_t owner) {
            return exchange.call("exchange_versions", [&](CopyExchange& given) {
              return given.exchange_versions(mine, owner);
            });
          },
          "mine"_a, "owner"_a)
      .def("finalize",
           [](RankCopies& exchange) { exchange.call_always("finalize", &CopyExchange::finalize); });
}

using RankStore = OnRank<CopyStore>;

/// @param move fetch_weights or add_gradients
/// @param tables addresses of slots and quotas, on the device
void move_stored_py(RankStore& store, const char* who,
                    void (CopyStore::*move)(const CopyStoreCall&, const Stream&),
                    const std::pair<std::uintptr_t, std::uintptr_t>& tables,
                    const std::pair<std::int32_t, std::int32_t>& sizes, const PartArgs& parts,
                    const AddressArgs& home, const AddressArgs& copies,
                    const std::tuple<std::uint32_t, std::int64_t, bool>& held,
                    std::uintptr_t stream) {
  const auto of_parts = parts_from(parts);
  const auto to_home = pointers_from(home);
  const auto to_copies = pointers_from(copies);
  const auto of_plan = pointers_from({tables.first, tables.second});
  const auto [owner, stamp, fresh] = held;
  const CopyStoreCall call{.num_experts = sizes.first,
                           .spare_experts = sizes.second,
                           .slots = reinterpret_cast<const std::int32_t*>(of_plan[0]),
                           .quotas = reinterpret_cast<const std::int32_t*>(of_plan[1]),
                           .parts = of_parts,
                           .home = to_home,
                           .copies = to_copies,
                           .owner = owner,
                           .stamp = stamp,
                           .fresh = fresh};
  const Stream queue = stream_from(stream);
  store.call(
      who, [&](CopyStore& given) { (given.*move)(call, queue); }, queue);
}

/// The bytes first..first + count of a store.
nb::object stored_bytes_py(RankStore& store, std::int64_t first, std::int64_t count) {
  auto [view, memory] = store.call_always("CopyStore", [&](CopyStore& given) {
    return std::pair(ConstTensorView(given.data() + first, DType::uint8, {count}),
                     std::vector<std::shared_ptr<void>>{given.memory()});
  });
  return array_over(view, *store.rank(), owner_of(store.rank(), std::move(memory)));
}

void bind_copy_store(nb::module_& m) {
  nb::class_<RankStore> type(m, "CopyStore");
  type.def(
      "__init__",
      [](RankStore* self, const WorldHandle& world, std::int64_t size_bytes, std::int32_t spare) {
        new (self) RankStore(world, "CopyStore", [&](const World& ranks) {
          return CopyStore(ranks, size_bytes, spare);
        });
      },
      "world"_a, "size_bytes"_a, "spare_experts"_a);
  const auto add = [&](const char* who,
                       void (CopyStore::*move)(const CopyStoreCall&, const Stream&)) {
    type.def(
        who,
        [who, move](RankStore& store, const std::pair<std::uintptr_t, std::uintptr_t>& tables,
                    const std::pair<std::int32_t, std::int32_t>& sizes, const PartArgs& parts,
                    const AddressArgs& home, const AddressArgs& copies,
                    const std::tuple<std::uint32_t, std::int64_t, bool>& held,
                    std::uintptr_t stream) {
          move_stored_py(store, who, move, tables, sizes, parts, home, copies, held, stream);
        },
        "tables"_a, "sizes"_a, "parts"_a, "home"_a, "copies"_a, "held"_a, "stream"_a);
  };
  add("fetch_weights", &CopyStore::fetch_weights);
  add("add_gradients", &CopyStore::add_gradients);
  type.def("bytes", stored_bytes_py, "first"_a, "count"_a).def("finalize", [](RankStore& store) {
    store.call_always("finalize", &CopyStore::finalize);
  });
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<LayoutHandle>(m, "EPLayout")
      .def_prop_ro("num_tokens", [](const LayoutHandle& h) { return h.layout->num_tokens(); })
      .def_prop_ro("number", [](const LayoutHandle& h) { return h.layout->number(); })
      .def("num_recv_rows",
           [](const LayoutHandle& h) {
             return call(*h.rank, nullptr, "num_recv_rows", std::nullopt,
                         [&] { return h.layout->num_recv_rows(); });
           })
      .def("table", table_py, "name"_a, "stream"_a);
  bind_layer(m);
  bind_contexts(m);
  bind_copies(m);
  bind_copy_store(m);
}

}  // namespace waybill::python
