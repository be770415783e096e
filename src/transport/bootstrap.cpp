#include "waybill/transport/bootstrap.h"

#include <exception>

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
  if (!failure_.empty()) throw TransportError(concat(operation, ": the bootstrap is ", failure_));
  try {
    auto all = exchange(mine, operation);
    if (std::ssize(all) != world_size_) {
      throw TransportError(concat(operation, ": the exchange returned ", all.size(),
                                  " entries, expected ", world_size_));
    }
    return all;
  } catch (const Interrupted& error) {
    end("unusable after an interrupt: ", error.what());
    tell_failure(error.what());
    throw;
  } catch (const Timeout& error) {
    end("unusable after a failure: ", error.what());
    if (tells_timeouts()) tell_failure(error.what());
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

void Bootstrap::fail(std::string_view reason) noexcept {
  if (!failure_.empty()) return;
  if (reason.empty()) reason = "no reason given";
  end("unusable after a failure: ", reason);
  tell_failure(reason);
}

void Bootstrap::end(const char* how, std::string_view reason) noexcept {
  try {
    failure_ = concat(how, reason);
  } catch (const std::exception&) {
    failure_ = "unusable";  // short enough to need no memory
  }
}

void Bootstrap::barrier(std::string_view operation) { (void)all_gather({}, operation); }

void Bootstrap::check_peers(std::string_view /*operation*/) const {}

std::shared_ptr<FailureScope> Bootstrap::failure_scope() const { return nullptr; }

}  // namespace waybill
