#include "waybill/transport/bootstraps.h"

namespace waybill {
namespace {

class CallableBootstrap final : public Bootstrap {
 public:
  CallableBootstrap(std::int32_t rank, std::int32_t world_size, AllGather all_gather,
                    double timeout_s)
      : Bootstrap(rank, world_size, timeout_s), all_gather_(std::move(all_gather)) {}

 private:
  std::vector<Bytes> exchange(std::span<const std::byte> mine,
                              std::string_view /*operation*/) override {
    return all_gather_(Bytes(mine.begin(), mine.end()));
  }

  AllGather all_gather_;
};

}  // namespace

std::unique_ptr<Bootstrap> make_callable_bootstrap(std::int32_t rank, std::int32_t world_size,
                                                   AllGather all_gather, double timeout_s) {
  require(all_gather != nullptr, "make_callable_bootstrap: all_gather is empty");
  return std::make_unique<CallableBootstrap>(rank, world_size, std::move(all_gather), timeout_s);
}

}  // namespace waybill
