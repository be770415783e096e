#include "waybill/runtime/world.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/printable.h"
#include "core/test_hooks.h"
#include "runtime/executor.h"
#include "transport/transport.h"
#include "waybill/core/error.h"
#include "waybill/core/wait.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

struct World::Engine {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Executor> executor;  ///< goes first
  std::uint64_t num_objects = 0;
};

World::World(std::unique_ptr<Transport> transport, std::unique_ptr<Executor> executor)
    : engine_(std::make_shared<Engine>(Engine{std::move(transport), std::move(executor)})) {
  require(engine_->transport != nullptr, "World: transport is null");
  require(engine_->executor != nullptr, "World: executor is null");
  (void)detail::test_hooks();  // a wrong one is an error here, whatever the world is made of
}

Rank World::rank() const noexcept { return engine_->transport->rank(); }
const Topology& World::topology() const noexcept { return engine_->transport->topology(); }
Transport& World::transport() const noexcept { return *engine_->transport; }
Executor& World::executor() const noexcept { return *engine_->executor; }
std::uint64_t World::next_object() const noexcept { return ++engine_->num_objects; }
const LinkSpeeds& World::links() const noexcept { return engine_->transport->links(); }

void World::use_links(const LinkSpeeds& links, std::string_view measured_on) const {
  constexpr const char* who = "World::use_links";
  agree_on_settings(*engine_->transport, who, [&]() -> std::vector<Setting> {
    links.check(who);
    return {{"nvlink_bytes_per_second", concat(links.nvlink_bytes_per_second)},
            {"network_bytes_per_second", concat(links.network_bytes_per_second)},
            {"block_bytes_per_second", concat(links.block_bytes_per_second)}};
  });
  engine_->transport->set_links(links);
  const std::string device = engine_->executor->device_name();
  const bool speaks = to_int(topology().local_rank(rank())) == 0;
  if (!speaks || measured_on.empty() || device.empty() || measured_on == device) return;
  const std::string line =
      concat("waybill: ", who, ": these speeds were measured on ", printable_line(measured_on),
             ", but rank ", rank(), " has ", device,
             "; rows arrive all the same, perhaps by a slower way: waybill calibrate measures the "
             "links of this machine\n");
  (void)std::fputs(line.c_str(), stderr);
}

void World::barrier() const { engine_->transport->barrier("World::barrier"); }

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

namespace {

/// An error of a rank's own comes before a deadline, which may have passed because that rank was
/// gone, and a deadline before what released ranks say.
int weight_of(const std::exception_ptr& error) {
  if (error == nullptr) return 0;
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailed&) {
    return 1;
  } catch (const Timeout&) {
    return 2;
  } catch (...) {
    return 3;
  }
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an error without a text";
  }
}

/// Waits for all ranks, and for the user, who ends them.
void await_ranks(const std::atomic<std::int32_t>& running, FailureScope& scope) {
  PollingWait wait(std::numeric_limits<double>::infinity());
  try {
    while (running > 0) (void)wait.pause();
  } catch (const std::exception& interrupted) {
    scope.interrupt(interrupted.what());
    throw;
  }
}

}  // namespace

void run_ranks_as_threads(std::int32_t world_size,
                          const std::function<void(std::shared_ptr<Bootstrap>)>& body,
                          double timeout_s) {
  auto bootstraps = make_thread_bootstraps(world_size, timeout_s);
  const auto scope = bootstraps.front()->failure_scope();
  std::vector<std::exception_ptr> errors(world_size);  // each thread writes its own
  std::atomic<std::int32_t> running = world_size;
  const auto run = [&](std::int32_t r) {
    const EnteredWaitScope entered(scope);
    auto& error = errors[r];
    try {
      body(std::move(bootstraps[r]));
    } catch (...) {
      error = std::current_exception();
      scope->fail(concat("rank ", r, " failed: ", text_of(error)));
    }
    --running;
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (std::int32_t r = 0; r < world_size; ++r) threads.emplace_back(run, r);
    } catch (const std::exception& error) {  // more threads than the host allows
      scope->fail(error.what());
      throw Unsupported(concat("run_ranks_as_threads: ", error.what(), ": ", threads.size(), " of ",
                               world_size,
                               " ranks have a thread, and this host allows no more (ulimit -u, "
                               "pids.max of a container)"));
    }
    await_ranks(running, *scope);
  }
  const auto first = std::ranges::max_element(errors, {}, weight_of);
  if (first != errors.end() && *first != nullptr) std::rethrow_exception(*first);
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
