#include "waybill/transport/share_memory.h"

#include <unistd.h>

#include <string>

namespace waybill {
namespace {

struct Offer {
  std::int64_t process;
  std::int64_t size;
  const std::shared_ptr<void>* block;  ///< read between the exchange and the barrier
};

}  // namespace

std::vector<std::shared_ptr<void>> share_memory(Bootstrap& bootstrap, std::shared_ptr<void> mine,
                                                std::int64_t size, std::string_view name) {
  const std::string operation = concat("share_memory(", name, ")");
  const auto offers = all_gather_value(bootstrap, Offer{getpid(), size, &mine}, operation);
  for (std::size_t r = 0; r < offers.size(); ++r) {
    if (offers[r].process != getpid()) {
      throw Unsupported(
          concat(operation, ": rank ", r, " is another process, expected threads of one process"));
    }
    require(offers[r].size == size, operation, ": size = ", size, ", but ", offers[r].size,
            " on rank ", r);
  }
  std::vector<std::shared_ptr<void>> all;
  for (const Offer& offer : offers) all.push_back(*offer.block);
  bootstrap.barrier(operation);
  return all;
}

}  // namespace waybill
