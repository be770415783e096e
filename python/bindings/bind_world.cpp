#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "rank_world.h"
#include "waybill/core/error.h"
#include "waybill/transport/bootstraps.h"
#ifdef WAYBILL_PYTHON_CUDA
#include "waybill/cuda/gpu_world.h"
#endif

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

/// How a rank of threads meets the others; used up by the world that is made with it.
struct Meeting {
  std::unique_ptr<Bootstrap> bootstrap;

  std::shared_ptr<Bootstrap> take(const char* who) {
    require(bootstrap != nullptr, who, ": the bootstrap was used before, expected a fresh one");
    return std::move(bootstrap);
  }
};

std::vector<Meeting> thread_meetings(std::int32_t world_size, double timeout_s) {
  std::vector<Meeting> meetings;
  for (auto& bootstrap : make_thread_bootstraps(world_size, timeout_s)) {
    meetings.push_back({std::move(bootstrap)});
  }
  return meetings;
}

WorldHandle host_world(Meeting& meeting, std::int32_t ranks_per_node) {
  auto bootstrap = meeting.take("World");
  return unlocked([&] {
    return WorldHandle{
        std::make_shared<RankWorld>(make_thread_world(std::move(bootstrap), ranks_per_node), -1)};
  });
}

#ifdef WAYBILL_PYTHON_CUDA
constexpr bool has_cuda = true;

int count_gpus() { return num_gpus(); }

WorldHandle gpu_world(Meeting& meeting, int device, std::int32_t ranks_per_node) {
  auto bootstrap = meeting.take("World");
  return unlocked([&] {
    World world = make_gpu_thread_world(std::move(bootstrap), device, ranks_per_node);
    return WorldHandle{std::make_shared<RankWorld>(std::move(world), device)};
  });
}
#else
constexpr bool has_cuda = false;

int count_gpus() { return 0; }

WorldHandle gpu_world(Meeting& /*meeting*/, int /*device*/, std::int32_t /*ranks_per_node*/) {
  throw Unsupported("World: this installation was built without CUDA; it has ranks in host memory");
}
#endif

}  // namespace

void bind_world(nb::module_& m) {
  m.attr("has_cuda") = has_cuda;
  m.def("num_gpus", [] { return unlocked(count_gpus); });
  nb::class_<Meeting>(m, "Meeting");
  m.def("thread_meetings", &thread_meetings, "world_size"_a, "timeout_s"_a);
  m.def("host_world", &host_world, "meeting"_a, "ranks_per_node"_a);
  m.def("gpu_world", &gpu_world, "meeting"_a, "device"_a, "ranks_per_node"_a);
  nb::class_<WorldHandle> world(m, "World");
  world.def_prop_ro("rank", [](const WorldHandle& w) { return to_int(w.rank->world().rank()); });
  world.def_prop_ro("world_size",
                    [](const WorldHandle& w) { return w.rank->world().world_size(); });
  world.def_prop_ro("ranks_per_node",
                    [](const WorldHandle& w) { return w.rank->world().topology().ranks_per_node; });
  world.def_prop_ro("timeout_s",
                    [](const WorldHandle& w) { return w.rank->world().transport().timeout_s(); });
  world.def_prop_ro("device", [](const WorldHandle& w) { return w.rank->device(); });
  world.def("barrier", [](const WorldHandle& w) {
    unlocked([&] {
      const RankWorld::Call call(*w.rank, "World.barrier");
      w.rank->world().barrier();
    });
  });
}

}  // namespace waybill::python
