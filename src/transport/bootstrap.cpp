#include "waybill/transport/bootstrap.h"

#include <new>

namespace waybill {

Bootstrap::Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s)
    : rank_{rank}, world_size_(world_size), timeout_s_(timeout_s) {
  require(1 <= world_size && world_size <= max_world_size, "Bootstrap: world_size = ", world_size,
          ", expected 1..", max_world_size);
  require(0 <= rank && rank < world_size, "Bootstrap: rank = ", rank, ", expected 0..",
          world_size - 1);
  require(timeout_s > 0, "Bootstrap: timeout_s = ", timeout_s, ", expected > 0");
}

std::vector<Bootstrap::Bytes> Bootstrap::all_gather(std::span<const std::byte> mine,
                                                    std::string_view operation) {
  if (!failure_.empty()) {
    throw TransportError(
        concat(operation, ": the bootstrap is unusable since rank ", rank_, " failed: ", failure_));
  }
  try {
    auto all = exchange(mine, operation);
    if (std::ssize(all) != world_size_) {
      throw TransportError(concat(operation, ": the exchange returned ", all.size(),
                                  " entries, expected ", world_size_));
    }
    return all;
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

void Bootstrap::fail(std::string_view reason) noexcept {
  if (!failure_.empty()) return;
  try {
    failure_ = reason.empty() ? "no reason given" : reason;
  } catch (const std::bad_alloc&) {
    failure_ = "no memory";  // short enough to need none
  }
  tell_failure(failure_);
}

void Bootstrap::barrier(std::string_view operation) { (void)all_gather({}, operation); }

}  // namespace waybill
