#include "waybill/runtime/world.h"

#include <exception>
#include <thread>
#include <vector>

#include "waybill/core/at.h"
#include "waybill/core/error.h"
#include "waybill/transport/agree.h"
#include "waybill/transport/bootstraps.h"

namespace waybill {

World::World(std::unique_ptr<Transport> transport, std::unique_ptr<Executor> executor)
    : transport_(std::move(transport)), executor_(std::move(executor)) {
  require(transport_ != nullptr, "World: transport is null");
  require(executor_ != nullptr, "World: executor is null");
}

namespace {

using MakeTransport = std::unique_ptr<Transport> (*)(std::shared_ptr<Bootstrap>, std::int32_t);

World host_world(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node,
                 MakeTransport make_transport) {
  require(bootstrap != nullptr, "World: bootstrap is null");
  return fail_on_error(*bootstrap, [&]() -> World {
    auto transport = make_transport(bootstrap, ranks_per_node);
    auto executor = make_host_executor(*transport);
    return {std::move(transport), std::move(executor)};
  });
}

}  // namespace

World make_thread_world(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node) {
  return host_world(std::move(bootstrap), ranks_per_node, make_thread_transport);
}

World make_process_world(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node) {
  return host_world(std::move(bootstrap), ranks_per_node, make_process_transport);
}

void run_ranks_as_threads(std::int32_t world_size,
                          const std::function<void(std::shared_ptr<Bootstrap>)>& body,
                          double timeout_s) {
  auto bootstraps = make_thread_bootstraps(world_size, timeout_s);
  std::vector<std::exception_ptr> errors(detail::at(world_size));
  {
    std::vector<std::jthread> threads;
    for (std::int32_t r = 0; r < world_size; ++r) {
      threads.emplace_back([&, r] {
        try {
          body(std::move(bootstraps[detail::at(r)]));
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

void run_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                      const ThreadWorldOptions& options) {
  run_ranks_as_threads(
      world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap) {
        World world = make_thread_world(std::move(bootstrap), options.ranks_per_node);
        body(world);
      },
      options.timeout_s);
}

}  // namespace waybill
