#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "rank_dispatcher.h"
#include "waybill/core/error.h"
#include "waybill/planner/attention_plan.h"

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

/// Metadata, the (dtype, elements of a row) of the tensors that go that way, the plan whose relay
/// schedule they may follow, or None, and rows for which windows have room in any case.
using PartArg = std::tuple<const SparseMetadata*, std::vector<std::pair<std::string, std::int64_t>>,
                           const AttentionPlan*, std::int64_t>;

/// Rows in host or device memory: (address, dtype, rows, elements of a row, elements from row to
/// row). The package has checked that the memory is there: exporting a tensor of a GPU through
/// DLPack would queue events on other streams, which a captured graph forbids.
using RowsArg = std::tuple<std::uintptr_t, std::string, std::int64_t, std::int64_t, std::int64_t>;

std::vector<SequencePart> parts_from(const std::vector<PartArg>& given) {
  std::vector<SequencePart> parts;
  for (const auto& [metadata, formats, relayed, min_rows] : given) {
    SequencePart part{metadata, {}, nullptr, min_rows};
    if (relayed != nullptr && !relayed->relay.empty()) part.relay = &relayed->relay;
    for (const auto& [dtype, hidden] : formats) {
      part.tensors.push_back({dtype_from_name(dtype), hidden});
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

template <class View>
std::vector<View> views_from(const std::vector<RowsArg>& given) {
  std::vector<View> views;
  for (const auto& [address, dtype, rows, hidden, row_stride] : given) {
    // The address is one that Python has of the caller's tensor.
    View view(reinterpret_cast<void*>(address),  // NOLINT(performance-no-int-to-ptr)
              dtype_from_name(dtype), Shape{rows, hidden});
    view.strides = {row_stride, 1};
    views.push_back(std::move(view));
  }
  return views;
}

RelayUse relay_from(std::string_view name) {
  if (name == "automatic") return RelayUse::automatic;
  if (name == "never") return RelayUse::never;
  require(name == "always", "SequenceDispatcher: relay = \"", name,
          "\", expected \"automatic\", \"never\" or \"always\"");
  return RelayUse::always;
}

void bind_ready_plan(nb::module_& m) {
  nb::class_<RankPlan> plan(m, "PlanHandle");
  plan.def_prop_ro("own_rows", [](const RankPlan& p) { return p.facts().own_rows; });
  plan.def_prop_ro("window_rows", [](const RankPlan& p) { return p.facts().window_rows; });
  plan.def_prop_ro("window_bytes", [](const RankPlan& p) { return p.facts().window_bytes; });
  plan.def_prop_ro("way", [](const RankPlan& p) { return to_string(p.facts().way); });
  plan.def_prop_ro("num_slots", [](const RankPlan& p) { return p.facts().num_slots; });
  plan.def_prop_ro("wire_bytes", [](const RankPlan& p) { return p.facts().wire_bytes; });
}

}  // namespace

void bind_dispatcher(nb::module_& m) {
  bind_ready_plan(m);
  nb::class_<RankDispatcher> dispatcher(m, "Dispatcher");
  dispatcher.def(
      "__init__",
      [](RankDispatcher* self, const WorldHandle& world, int num_sms, std::int64_t chunk_bytes,
         bool local_by_copy_engine, std::int64_t max_window_bytes, std::string_view relay) {
        SequenceDispatcherOptions options;
        options.num_sms = num_sms;
        options.plan.chunk_bytes = chunk_bytes;
        options.local_by_copy_engine = local_by_copy_engine;
        options.max_window_bytes = max_window_bytes;
        options.plan.relay = relay_from(relay);
        unlocked([&] { new (self) RankDispatcher(world.rank, options); });
      },
      "world"_a, "num_sms"_a, "chunk_bytes"_a, "local_by_copy_engine"_a, "max_window_bytes"_a,
      "relay"_a);
  dispatcher.def("plan", [](RankDispatcher& d, bool gradient, const std::vector<PartArg>& given,
                            std::uintptr_t stream) {
    const auto parts = parts_from(given);
    return unlocked([&] { return d.plan(gradient, parts, stream_from(stream)); });
  });
  dispatcher.def("replace_plan", [](RankDispatcher& d, RankPlan& plan,
                                    const std::vector<PartArg>& given, std::uintptr_t stream) {
    const auto parts = parts_from(given);
    plan.set_facts(
        unlocked([&] { return d.replace_plan(plan.plan(), parts, stream_from(stream)); }));
  });
  dispatcher.def("reserve", [](RankDispatcher& d, std::int64_t bytes, std::int32_t num_slots,
                               std::uintptr_t stream) {
    unlocked([&] { d.reserve(bytes, num_slots, stream_from(stream)); });
  });
  dispatcher.def(
      "dispatch", [](RankDispatcher& d, const RankPlan& plan, const std::vector<RowsArg>& tensors,
                     std::uintptr_t stream, std::uint64_t of_dispatch) {
        const auto inputs = views_from<ConstTensorView>(tensors);
        return d.arrays(unlocked(
            [&] { return d.dispatch(plan.plan(), inputs, stream_from(stream), of_dispatch); }));
      });
  dispatcher.def(
      "kv_gradient",
      [](RankDispatcher& d, const RankPlan& plan, const std::vector<RowsArg>& gradients,
         const std::vector<RowsArg>& sums, std::uintptr_t stream, std::uint64_t of_dispatch) {
        const auto inputs = views_from<ConstTensorView>(gradients);
        const auto outputs = views_from<TensorView>(sums);
        unlocked(
            [&] { d.kv_gradient(plan.plan(), inputs, outputs, stream_from(stream), of_dispatch); });
      });
  dispatcher.def("gradient_inputs", [](RankDispatcher& d, const RankPlan& plan,
                                       std::uintptr_t stream) {
    return d.arrays(unlocked([&] { return d.gradient_inputs(plan.plan(), stream_from(stream)); }));
  });
  dispatcher.def("synchronize", [](RankDispatcher& d, std::uintptr_t stream) {
    unlocked([&] { d.synchronize(stream_from(stream)); });
  });
  dispatcher.def("close", [](RankDispatcher& d) { unlocked([&] { d.close(); }); });
  dispatcher.def_prop_ro("window_bytes", &RankDispatcher::window_bytes);
  dispatcher.def_prop_ro("last_dispatch", &RankDispatcher::last_dispatch);
}

}  // namespace waybill::python
