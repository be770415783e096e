#include "waybill/runtime/world.h"

#include <exception>
#include <thread>
#include <vector>

#include "waybill/core/at.h"
#include "waybill/core/error.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {

World::World(std::unique_ptr<Transport> transport, std::unique_ptr<Executor> executor)
    : transport_(std::move(transport)), executor_(std::move(executor)) {
  require(transport_ != nullptr, "World: transport is null");
  require(executor_ != nullptr, "World: executor is null");
}

World make_thread_world(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node) {
  auto transport = make_thread_transport(std::move(bootstrap), ranks_per_node);
  auto executor = make_host_executor(*transport);
  return {std::move(transport), std::move(executor)};
}

void run_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                      const ThreadWorldOptions& options) {
  auto bootstraps = make_thread_bootstraps(world_size, options.timeout_s);
  const Topology topology{world_size,
                          options.ranks_per_node == 0 ? world_size : options.ranks_per_node};
  topology.check();
  std::vector<std::exception_ptr> errors(detail::at(world_size));
  {
    std::vector<std::jthread> threads;
    for (std::int32_t r = 0; r < world_size; ++r) {
      threads.emplace_back([&, r] {
        try {
          World world =
              make_thread_world(std::move(bootstraps[detail::at(r)]), options.ranks_per_node);
          body(world);
        } catch (...) {
          errors[detail::at(r)] = std::current_exception();
        }
      });
    }
  }
  std::exception_ptr first;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const Timeout&) {
      if (!first) first = error;  // perhaps only because another rank threw something else
    } catch (...) {
      first = error;
      break;
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace waybill
