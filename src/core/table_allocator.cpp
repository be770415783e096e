#include "waybill/core/table_allocator.h"

#include <cstdlib>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace waybill::detail {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

}  // namespace

void* allocate_table_memory(std::size_t num_bytes) {
  const bool huge = num_bytes >= huge_page_bytes;
  void* memory = nullptr;
  if (posix_memalign(&memory, huge ? huge_page_bytes : 64, num_bytes) != 0) throw std::bad_alloc();
#ifdef __linux__
  // Advice only: where it is refused the table lies in small pages. The last, partial page stays
  // small, so that no memory is taken that the table does not have.
  if (huge) madvise(memory, num_bytes / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

void free_table_memory(void* memory) noexcept { std::free(memory); }

}  // namespace waybill::detail
