#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "errors.h"
#include "rank_world.h"
#include "transport/transport.h"
#include "waybill/core/error.h"
#include "waybill/json/plan_json.h"
#include "waybill/transport/bootstrap.h"
#ifdef WAYBILL_PYTHON_CUDA
#include "cuda/gpu_report.h"
#include "waybill/cuda/gpu_world.h"
#endif

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

/// A bootstrap as Python holds it; used up by the world that is made with it.
struct GivenBootstrap {
  std::unique_ptr<Bootstrap> bootstrap;

  std::shared_ptr<Bootstrap> take() {
    require(bootstrap != nullptr, "World: the bootstrap was used before, expected a new one");
    return std::move(bootstrap);
  }
};

/// A bootstrap per rank, and the scope that ends their waits together.
std::pair<std::vector<GivenBootstrap>, ScopeHandle> thread_bootstraps(std::int32_t world_size,
                                                                      double timeout_s) {
  std::vector<GivenBootstrap> handles;
  for (auto& bootstrap : make_thread_bootstraps(world_size, timeout_s)) {
    handles.push_back({std::move(bootstrap)});
  }
  auto scope = handles.front().bootstrap->failure_scope();
  return {std::move(handles), ScopeHandle{std::move(scope)}};
}

/// Python objects may go on a thread without the interpreter's lock.
std::shared_ptr<nb::object> shared(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            if (Py_IsInitialized() == 0) return;  // it went with the interpreter
            const nb::gil_scoped_acquire acquire;
            delete held;
          }};
}

std::vector<Bootstrap::Bytes> call_all_gather(const nb::object& all_gather,
                                              const Bootstrap::Bytes& mine) try {
  std::vector<Bootstrap::Bytes> all;
  for (const nb::handle item : all_gather(nb::bytes(mine.data(), mine.size()))) {
    require(nb::isinstance<nb::bytes>(item), "World: all_gather returned ",
            nb::type_name(item.type()).c_str(), ", expected bytes of each rank");
    const auto given = nb::borrow<nb::bytes>(item);
    const auto* const first = reinterpret_cast<const std::byte*>(given.c_str());
    all.emplace_back(first, first + given.size());
  }
  return all;
} catch (nb::python_error& error) {
  throw_raised(std::move(error));
}

/// The bootstrap, ranks_per_node and local_rank that the launcher's variables say.
std::tuple<GivenBootstrap, std::int32_t, std::int32_t> environment_bootstrap(double timeout_s) {
  note_sigint_from_now_on();
  const LaunchEnvironment environment = read_launch_environment();
  return {GivenBootstrap{make_environment_bootstrap(environment, timeout_s)},
          environment.ranks_per_node, environment.local_rank};
}

/// For a rank that cannot make its bootstrap: the others name it and do not wait.
void report_failure(const std::string& reason, double patience_s) {
  try {
    report_failed_start(read_launch_environment(), reason, patience_s);
  } catch (const Error&) {  // the launcher is wrong: nobody knows where the others are
    return;
  }
}

/// `all_gather(mine: bytes) -> list of bytes, by rank` of the caller's, and
/// `tell_failure(reason: str)` or None.
GivenBootstrap callable_bootstrap(std::int32_t rank, std::int32_t world_size,
                                  nb::callable all_gather, nb::object tell_failure,
                                  double timeout_s) {
  const auto gather = shared(std::move(all_gather));
  const auto exchange = [gather](const Bootstrap::Bytes& mine) {
    const nb::gil_scoped_acquire acquire;
    return call_all_gather(*gather, mine);
  };
  TellFailure tell;
  if (!tell_failure.is_none()) {
    tell = [function = shared(std::move(tell_failure))](std::string_view reason) {
      const nb::gil_scoped_acquire acquire;
      (void)(*function)(nb::str(reason.data(), reason.size()));
    };
  }
  return {make_callable_bootstrap(rank, world_size, exchange, timeout_s, std::move(tell))};
}

/// @param make from the bootstrap and `place`: the device, if it takes one, and ranks_per_node
template <auto make, class... Place>
WorldHandle world_of(GivenBootstrap& given, int device, bool in_step, const Place&... place) {
  note_sigint_from_now_on();
  auto bootstrap = given.take();
  auto scope = bootstrap->failure_scope();
  return unlocked([&] {
    return WorldHandle{std::make_shared<RankWorld>(make(std::move(bootstrap), place...),
                                                   std::move(scope), device, in_step)};
  });
}

template <auto make>
WorldHandle host_world(GivenBootstrap& given, std::int32_t ranks_per_node) {
  return world_of<make>(given, -1, false, ranks_per_node);
}

/// Collective: names and values that all ranks must have the same.
void require_same(const WorldHandle& world, const std::string& who,
                  const std::vector<std::pair<std::string, std::string>>& mine) {
  std::vector<Setting> settings;
  for (const auto& [name, value] : mine) settings.push_back({name, value});
  call(*world.object, nullptr, who.c_str(), std::nullopt,
       [&] { world.object->world().transport().require_same(who, settings); });
}

#ifdef WAYBILL_PYTHON_CUDA
constexpr bool has_cuda = true;

int count_gpus() { return num_gpus(); }
std::string trouble_of_driver() { return driver_trouble(); }

/// (rank, device, ranks of this process on it, text) of each.
nb::list faults() {
  nb::list list;
  for (const DeviceFault& fault : device_faults()) {
    list.append(nb::make_tuple(fault.rank, fault.device, fault.num_ranks, fault.text));
  }
  return list;
}

/// @param in_step no two ranks share a GPU. Where they do, one thread of autograd runs the backward
///   calls of both, and would wait for itself.
WorldHandle gpu_thread_world(GivenBootstrap& given, int device, std::int32_t ranks_per_node,
                             bool in_step) {
  return world_of<make_gpu_thread_world>(given, device, in_step, device, ranks_per_node);
}

WorldHandle gpu_process_world(GivenBootstrap& given, int device, std::int32_t ranks_per_node) {
  return world_of<make_gpu_process_world>(given, device, false, device, ranks_per_node,
                                          NetworkBackend::automatic);
}

WorldHandle nvshmem_world(GivenBootstrap& given, int device, std::int32_t ranks_per_node) {
  return world_of<make_nvshmem_world>(given, device, false, device, ranks_per_node);
}
#else
constexpr bool has_cuda = false;

int count_gpus() { return 0; }
std::string trouble_of_driver() { return {}; }

nb::list faults() { return {}; }

WorldHandle no_gpu_world(GivenBootstrap& /*given*/, int /*device*/,
                         std::int32_t /*ranks_per_node*/) {
  throw Unsupported("World: this installation was built without CUDA");
}

WorldHandle gpu_thread_world(GivenBootstrap& given, int device, std::int32_t ranks_per_node,
                             bool /*in_step*/) {
  return no_gpu_world(given, device, ranks_per_node);
}
constexpr auto gpu_process_world = no_gpu_world;
constexpr auto nvshmem_world = no_gpu_world;
#endif

void bind_world_handle(nb::module_& m) {
  nb::class_<WorldHandle> world(m, "World");
  world.def_prop_ro("rank", [](const WorldHandle& w) { return to_int(w.object->world().rank()); });
  world.def_prop_ro("world_size",
                    [](const WorldHandle& w) { return w.object->world().world_size(); });
  world.def_prop_ro("ranks_per_node", [](const WorldHandle& w) {
    return w.object->world().topology().ranks_per_node;
  });
  world.def_prop_ro("timeout_s",
                    [](const WorldHandle& w) { return w.object->world().transport().timeout_s(); });
  world.def_prop_ro("device", [](const WorldHandle& w) { return w.object->device(); });
  world.def("require_same", &require_same, "who"_a, "mine"_a);
  world.def("use_links", [](const WorldHandle& w, double nvlink, double network, double block,
                            const std::string& measured_on) {
    call(*w.object, nullptr, "World.use_links", std::nullopt, [&] {
      w.object->world().use_links({nvlink, network, block}, measured_on);
    });
  });
  world.def("check_ended", [](const WorldHandle& w, const std::string& who) {
    w.object->check_ended(who.c_str());
  });
  world.def("barrier", [](const WorldHandle& w) {
    call(*w.object, nullptr, "World::barrier", std::nullopt, [&] { w.object->world().barrier(); });
  });
}

}  // namespace

void bind_world(nb::module_& m) {
  m.attr("has_cuda") = has_cuda;
  m.def("num_gpus", count_gpus, without_lock);
  m.def("driver_trouble", trouble_of_driver, without_lock);
  m.def("device_faults", faults);
  m.def("host_id", &host_id);
  nb::class_<GivenBootstrap>(m, "Bootstrap");
  m.def("thread_bootstraps", &thread_bootstraps, "world_size"_a, "timeout_s"_a);
  m.def("environment_bootstrap", &environment_bootstrap, "timeout_s"_a, without_lock);
  m.def("report_failed_start", &report_failure, "reason"_a, "patience_s"_a, without_lock);
  m.def("callable_bootstrap", &callable_bootstrap, "rank"_a, "world_size"_a, "all_gather"_a,
        "tell_failure"_a.none(), "timeout_s"_a);
  m.def("thread_world", host_world<make_thread_world>, "bootstrap"_a, "ranks_per_node"_a);
  m.def("process_world", host_world<make_process_world>, "bootstrap"_a, "ranks_per_node"_a);
  m.def("gpu_thread_world", gpu_thread_world, "bootstrap"_a, "device"_a, "ranks_per_node"_a,
        "in_step"_a);
  m.def("gpu_process_world", gpu_process_world, "bootstrap"_a, "device"_a, "ranks_per_node"_a);
  m.def("nvshmem_world", nvshmem_world, "bootstrap"_a, "device"_a, "ranks_per_node"_a);
  bind_world_handle(m);
  constexpr LinkSpeeds usual;
  m.attr("default_links") = nb::make_tuple(
      usual.nvlink_bytes_per_second, usual.network_bytes_per_second, usual.block_bytes_per_second);
  m.attr("link_speed_range") = nb::make_tuple(LinkSpeeds::least, LinkSpeeds::most);
  m.def("links_from_json", [](const std::string& text, const std::string& origin) {
    const auto [links, device, num_gpus] = links_from_json(text, origin);
    return std::tuple(links.nvlink_bytes_per_second, links.network_bytes_per_second,
                      links.block_bytes_per_second, device);
  });
}

}  // namespace waybill::python
