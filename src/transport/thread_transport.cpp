#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "host_transport.h"
#include "transport/share_memory.h"

namespace waybill {
namespace {

constexpr std::int64_t alignment_bytes = 256;
constexpr std::int64_t least_mapped_bytes = 64 << 10;

/// Zeros, on a 256-byte boundary; pages that nobody writes cost nothing. Large blocks are mapped
/// here: calloc writes zeros into what a thread's arena gives it.
std::shared_ptr<void> make_block(std::int64_t size_bytes) {
  if (size_bytes >= least_mapped_bytes) {
    const std::size_t bytes = size_bytes;
    void* const first =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (first == MAP_FAILED) throw std::bad_alloc();
    return {first, [bytes](void* block) { (void)munmap(block, bytes); }};
  }
  std::size_t room = size_bytes + alignment_bytes;
  std::shared_ptr<void> block(std::calloc(room, 1), std::free);
  if (block == nullptr) throw std::bad_alloc();
  void* first = block.get();
  std::align(alignment_bytes, size_bytes, first, room);
  return {block, first};
}

class ThreadTransport final : public detail::HostTransport {
 public:
  ThreadTransport(std::shared_ptr<Bootstrap> bootstrap, std::int32_t ranks_per_node)
      : HostTransport(std::move(bootstrap), ranks_per_node) {}

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    return share_memory(bootstrap(), make_block(size_bytes), size_bytes, name);
  }
};

}  // namespace

std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<Bootstrap> bootstrap,
                                                 std::int32_t ranks_per_node) {
  require(bootstrap != nullptr, "make_thread_transport: bootstrap is null");
  return std::make_unique<ThreadTransport>(std::move(bootstrap), ranks_per_node);
}

}  // namespace waybill
