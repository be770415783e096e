#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "moe/option_names.h"
#include "rank_world.h"
#include "waybill/planner/planner.h"

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

/// Metadata, the (dtype, elements of a row) of the tensors that go that way, the relay schedule
/// that they may follow, or None, and rows and batches for which there is room in any case.
using PartArg = std::tuple<const SparseMetadata*, std::vector<std::pair<std::string, std::int64_t>>,
                           const RelaySchedule*, std::int64_t, std::int32_t>;

/// Rows in host or device memory: (address, dtype, rows, elements of a row, elements from row to
/// row). The package has checked that the memory is there: exporting a tensor of a GPU through
/// DLPack would queue events on other streams, which a captured graph forbids.
using RowsArg =
    std::tuple<std::uintptr_t, std::string_view, std::int64_t, std::int64_t, std::int64_t>;

/// The figures of a plan as they were when its call ended.
struct PlanFacts {
  explicit PlanFacts(const PlanHandle& plan)
      : own_rows(plan.own_rows().begin(), plan.own_rows().end()),
        window_rows(plan.window_rows().begin(), plan.window_rows().end()),
        window_offsets(plan.window_offsets().begin(), plan.window_offsets().end()),
        wire_bytes(plan.wire_bytes().begin(), plan.wire_bytes().end()),
        window_bytes(plan.window_bytes()),
        num_slots(plan.num_slots()),
        way(plan.limits().way) {}

  std::vector<std::int64_t> own_rows;
  std::vector<std::int64_t> window_rows;
  std::vector<std::int64_t> window_offsets;
  std::vector<std::int64_t> wire_bytes;
  std::int64_t window_bytes;
  std::int32_t num_slots;
  TransferMode way;
};

/// A plan of a dispatcher as Python holds it. While another thread replaces the plan, its figures
/// are the old ones: they change with the interpreter's lock.
struct RankPlan {
  RankPlan(std::shared_ptr<RankWorld> its_rank, PlanHandle its_plan)
      : rank(std::move(its_rank)), plan(std::move(its_plan)), facts(plan) {}
  RankPlan(RankPlan&&) = default;
  ~RankPlan() {
    if (rank != nullptr) rank->discard(std::move(plan));
  }

  std::shared_ptr<RankWorld> rank;
  PlanHandle plan;
  PlanFacts facts;
};

/// A window and its owners as a call left them: another thread may close the dispatcher as soon as
/// the call is over.
struct WindowMemory {
  std::byte* first = nullptr;
  std::int64_t size_bytes = 0;
  std::vector<std::shared_ptr<void>> owners;
};

/// A window as Python shows it.
struct ShownWindow {
  std::byte* first;
  nb::object bytes;              ///< an array of 8-bit integers over all of it, which keeps it
  nb::object made = nb::none();  ///< Python's own, from that
};

/// A dispatcher as Python holds it, with its figures after this rank's last call that is over.
class RankDispatcher : public OnRank<SequenceDispatcher> {
 public:
  using OnRank::OnRank;

  std::atomic<std::int64_t> window_bytes = 0;
  std::atomic<std::uint64_t> last_dispatch = 0;

  /// The window, made the first time that a call shows it.
  nb::object shown(WindowMemory&& memory);

  /// After calls in which windows may have grown: their memory waits for nobody who shows them.
  void forget_outgrown() {
    if (window_bytes != shown_bytes_) forget();
  }

  /// Before the windows are given back.
  void forget() noexcept { windows_.clear(); }

 private:
  void call_ended(const SequenceDispatcher& dispatcher) noexcept override {
    window_bytes = dispatcher.window_bytes();
    last_dispatch = dispatcher.last_dispatch();
  }

  std::int64_t shown_bytes_ = 0;  ///< the size of windows_; the interpreter's lock guards both
  std::vector<nb::object> windows_;
};

nb::object RankDispatcher::shown(WindowMemory&& memory) {
  for (const nb::object& window : windows_) {
    if (nb::cast<const ShownWindow&>(window).first == memory.first) return window;
  }
  if (shown_bytes_ != memory.size_bytes) forget();
  shown_bytes_ = memory.size_bytes;
  const ConstTensorView all(memory.first, DType::uint8, Shape{memory.size_bytes});
  const nb::capsule owner = owner_of(rank(), std::move(memory.owners));
  windows_.push_back(nb::cast(ShownWindow{memory.first, array_over(all, *rank(), owner)}));
  return windows_.back();
}

constexpr std::array<std::string_view, 3> relay_names{"automatic", "never", "always"};

std::vector<SequencePart> parts_from(const std::vector<PartArg>& given) {
  std::vector<SequencePart> parts;
  for (const auto& [metadata, formats, relay, min_rows, min_batches] : given) {
    SequencePart part{metadata, {}, nullptr, min_rows, min_batches};
    if (relay != nullptr && !relay->empty()) part.relay = relay;
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

/// The window in which the tensors of a plan lie.
WindowMemory memory_of(const SequenceDispatcher& dispatcher, const PlanHandle& plan,
                       std::span<const TensorView> tensors) {
  return {tensors[0].data - plan.window_offsets()[0], dispatcher.window_bytes(),
          dispatcher.window_memory()};
}

RankPlan plan_py(RankDispatcher& d, bool gradient, const std::vector<PartArg>& given,
                 std::uintptr_t stream) {
  const auto parts = parts_from(given);
  const Stream queue = stream_from(stream);
  return {d.rank(), d.call(gradient ? "plan_kv_gradient" : "plan_dispatch",
                           [&](SequenceDispatcher& dispatcher) {
                             return gradient ? dispatcher.plan_kv_gradient(parts, queue)
                                             : dispatcher.plan_dispatch(parts, queue);
                           })};
}

void replace_plan_py(RankDispatcher& d, RankPlan& plan, const std::vector<PartArg>& given,
                     std::uintptr_t stream) {
  const auto parts = parts_from(given);
  plan.facts = d.call("replace_plan", [&](SequenceDispatcher& dispatcher) {
    dispatcher.replace_plan(plan.plan, parts, stream_from(stream));
    return PlanFacts(plan.plan);
  });
}

nb::object dispatch_rows_py(RankDispatcher& d, const RankPlan& plan,
                            const std::vector<RowsArg>& tensors, std::uintptr_t stream,
                            std::uint64_t of_dispatch) {
  const auto inputs = views_from<ConstTensorView>(tensors);
  const Stream queue = stream_from(stream);
  const auto send = [&](SequenceDispatcher& dispatcher) {
    return memory_of(dispatcher, plan.plan,
                     dispatcher.dispatch(plan.plan, inputs, queue, of_dispatch));
  };
  return d.shown(d.call("dispatch", send, queue));
}

void kv_gradient_py(RankDispatcher& d, const RankPlan& plan, const std::vector<RowsArg>& gradients,
                    const std::vector<RowsArg>& sums, std::uintptr_t stream,
                    std::uint64_t of_dispatch) {
  const auto inputs = views_from<ConstTensorView>(gradients);
  const auto outputs = views_from<TensorView>(sums);
  const Stream queue = stream_from(stream);
  const auto sum = [&](SequenceDispatcher& dispatcher) {
    dispatcher.kv_gradient(plan.plan, inputs, outputs, queue, of_dispatch);
  };
  d.call("kv_gradient", sum, queue);
  d.forget_outgrown();
}

nb::object gradient_inputs_py(RankDispatcher& d, const RankPlan& plan, std::uintptr_t stream) {
  return d.shown(d.call("gradient_inputs", [&](SequenceDispatcher& dispatcher) {
    return memory_of(dispatcher, plan.plan,
                     dispatcher.gradient_inputs(plan.plan, stream_from(stream)));
  }));
}

SequenceDispatcherOptions sequence_options_py(int num_sms, std::int64_t chunk_bytes,
                                              bool local_by_copy_engine,
                                              std::int64_t max_window_bytes,
                                              std::string_view relay) {
  SequenceDispatcherOptions options;
  options.num_sms = num_sms;
  options.plan.chunk_bytes = chunk_bytes;
  options.local_by_copy_engine = local_by_copy_engine;
  options.max_window_bytes = max_window_bytes;
  options.plan.relay = detail::option_of<RelayUse>(relay_names, relay, "SequenceDispatcher: relay");
  return options;
}

void bind_plan_handle(nb::module_& m) {
  nb::class_<RankPlan> plan(m, "PlanHandle");
  plan.def_prop_ro("own_rows", [](const RankPlan& p) { return p.facts.own_rows; });
  plan.def_prop_ro("window_rows", [](const RankPlan& p) { return p.facts.window_rows; });
  plan.def_prop_ro("window_offsets", [](const RankPlan& p) { return p.facts.window_offsets; });
  plan.def_prop_ro("window_bytes", [](const RankPlan& p) { return p.facts.window_bytes; });
  plan.def_prop_ro("way", [](const RankPlan& p) { return to_string(p.facts.way); });
  plan.def_prop_ro("num_slots", [](const RankPlan& p) { return p.facts.num_slots; });
  plan.def_prop_ro("wire_bytes", [](const RankPlan& p) { return p.facts.wire_bytes; });
}

}  // namespace

void bind_dispatcher(nb::module_& m) {
  bind_plan_handle(m);
  nb::class_<ShownWindow>(m, "ShownWindow")
      .def_ro("bytes", &ShownWindow::bytes)
      .def_rw("made", &ShownWindow::made, nb::arg().none());
  nb::class_<SequenceDispatcherOptions>(m, "SequenceOptions");
  m.def("sequence_options", sequence_options_py, "num_sms"_a, "chunk_bytes"_a,
        "local_by_copy_engine"_a, "max_window_bytes"_a, "relay"_a);
  nb::class_<RankDispatcher> type(m, "Dispatcher");
  type.def("__init__", [](RankDispatcher* self, const WorldHandle& world,
                          const SequenceDispatcherOptions& options) {
    new (self) RankDispatcher(world, "SequenceDispatcher", [&](const World& ranks) {
      return SequenceDispatcher(ranks, options);
    });
  });
  type.def("plan", plan_py, "gradient"_a, "parts"_a, "stream"_a);
  type.def("replace_plan", replace_plan_py, "plan"_a, "parts"_a, "stream"_a);
  type.def(
      "reserve",
      [](RankDispatcher& d, std::int64_t bytes, std::int32_t num_slots, std::uintptr_t stream) {
        d.call("reserve", [&](SequenceDispatcher& dispatcher) {
          dispatcher.reserve(bytes, stream_from(stream), num_slots);
        });
        d.forget_outgrown();
      },
      "window_bytes"_a, "num_slots"_a, "stream"_a);
  type.def("dispatch", dispatch_rows_py, "plan"_a, "tensors"_a, "stream"_a, "of_dispatch"_a);
  type.def("kv_gradient", kv_gradient_py, "plan"_a, "gradients"_a, "sums"_a, "stream"_a,
           "of_dispatch"_a);
  type.def("gradient_inputs", gradient_inputs_py, "plan"_a, "stream"_a);
  type.def(
      "synchronize",
      [](RankDispatcher& d, std::uintptr_t stream) {
        d.call("synchronize", [&](SequenceDispatcher& dispatcher) {
          dispatcher.synchronize(stream_from(stream));
        });
      },
      "stream"_a);
  type.def("close", [](RankDispatcher& d) {
    d.forget();
    d.call_always("close", &SequenceDispatcher::close);
  });
  type.def_prop_ro("window_bytes", [](const RankDispatcher& d) { return d.window_bytes.load(); });
  type.def_prop_ro("last_dispatch", [](const RankDispatcher& d) { return d.last_dispatch.load(); });
}

}  // namespace waybill::python
