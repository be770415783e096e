#include "waybill/transport/bootstrap.h"

namespace waybill {

Bootstrap::Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s)
    : rank_{rank}, world_size_(world_size), timeout_s_(timeout_s) {
  require(1 <= world_size && world_size <= max_world_size, "Bootstrap: world_size = ", world_size,
          ", expected 1..", max_world_size);
  require(0 <= rank && rank < world_size, "Bootstrap: rank = ", rank, ", expected 0..",
          world_size - 1);
  check_timeout("Bootstrap", timeout_s);
}

std::vector<Bootstrap::Bytes> Bootstrap::all_gather(std::span<const std::byte> mine,
                                                    std::string_view operation) {
  if (!end_.empty()) throw TransportError(concat(operation, ": the bootstrap is ", end_));
  std::vector<Bytes> all;
  try {
    all = exchange(mine, operation);
  } catch (const Interrupted& error) {
    end_ = concat("unusable after an interrupt: ", error.what());
    fail(error.what());
    throw;
  } catch (const std::exception& error) {
    end_ = concat("unusable after a failure: ", error.what());
    throw;
  }
  if (std::ssize(all) != world_size_) {
    throw TransportError(concat(operation, ": the exchange returned ", all.size(),
                                " entries, expected ", world_size_));
  }
  return all;
}

void Bootstrap::barrier(std::string_view operation) { (void)all_gather({}, operation); }

void Bootstrap::fail(std::string_view /*reason*/) noexcept {}

void Bootstrap::check_peers(std::string_view /*operation*/) const {}

std::shared_ptr<FailureScope> Bootstrap::failure_scope() const { return nullptr; }

}  // namespace waybill
