#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "waybill/core/link_speeds.h"
#include "waybill/core/topology.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

class Executor;
class Transport;

/// A queue of device work: a cudaStream_t in GPU worlds (null: the default stream). Worlds in host
/// memory have none.
struct Stream {
  void* handle = nullptr;
};

/// A rank of a world: who the ranks are, how they reach each other and what does their work. A
/// handle: copies are the same rank, and it ends with the last of them; dispatchers and layers hold
/// one. A rank serves one thread at a time.
class World {
 public:
  /// For engines. @throws InvalidArgument for null.
  World(std::unique_ptr<Transport> transport, std::unique_ptr<Executor> executor);

  [[nodiscard]] Rank rank() const noexcept;
  [[nodiscard]] const Topology& topology() const noexcept;
  [[nodiscard]] std::int32_t world_size() const noexcept { return topology().world_size; }
  [[nodiscard]] Transport& transport() const noexcept;
  [[nodiscard]] Executor& executor() const noexcept;

  /// False once it has been moved from.
  [[nodiscard]] explicit operator bool() const noexcept { return engine_ != nullptr; }

  /// A number for what all ranks make together, from 1 on: as they do so in the same order, the
  /// same on all of them.
  [[nodiscard]] std::uint64_t next_object() const noexcept;

  /// Collective. @throws Timeout
  void barrier() const;

  /// Collective: how fast this machine's links are (waybill calibrate). For dispatchers and layers
  /// that are made from now on; a dispatcher with speeds of its own keeps those.
  /// @param measured_on LinkMeasurement::device. Where rows move between other GPUs, the first rank
  ///   of each node says so in one line on stderr; empty, or ranks in host memory: nothing is said
  /// @throws InvalidArgument on all ranks unless they give the same speeds; Timeout
  void use_links(const LinkSpeeds& links, std::string_view measured_on = {}) const;
  [[nodiscard]] const LinkSpeeds& links() const noexcept;

 private:
  struct Engine;
  std::shared_ptr<Engine> engine_;
};

/// A rank of the world whose ranks are threads of this process, in host memory. Collective.
/// @param ranks_per_node 0: all ranks on one node
[[nodiscard]] World make_thread_world(std::shared_ptr<Bootstrap> bootstrap,
                                      std::int32_t ranks_per_node = 0);

/// A rank of the world whose ranks are processes of one host, in host memory. Collective.
/// @param ranks_per_node 0: all ranks on one node
/// @throws Unsupported when a rank is on another host
[[nodiscard]] World make_process_world(std::shared_ptr<Bootstrap> bootstrap,
                                       std::int32_t ranks_per_node = 0);

struct ThreadWorldOptions {
  std::int32_t ranks_per_node = 0;  ///< 0: all ranks on one node
  double timeout_s = default_timeout_s;
};

/// Runs body(bootstrap) on one thread per rank and waits for all: for worlds of threads of any
/// kind. A body that throws releases the others from what they wait for, with PeerFailed; an
/// interrupt (check_interrupt) all of them.
/// @throws what a body threw: of several the first by rank that is neither PeerFailed nor Timeout,
///   else the first Timeout, else the first; Interrupted
void run_ranks_as_threads(std::int32_t world_size,
                          const std::function<void(std::shared_ptr<Bootstrap>)>& body,
                          double timeout_s = default_timeout_s);

/// Runs body(world) with a make_thread_world on one thread per rank and waits for all.
/// @throws as run_ranks_as_threads
void run_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                      const ThreadWorldOptions& options = {});

}  // namespace waybill
