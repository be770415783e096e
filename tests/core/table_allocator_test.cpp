#include "waybill/core/table_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <new>
#include <numeric>
#include <tuple>

namespace waybill::detail {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

bool begins_at_multiple_of(const void* memory, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(memory) % bytes == 0;
}

TEST(table_allocator, small_tables_begin_at_cache_lines_and_large_ones_at_huge_pages) {
  const TableVector<std::int32_t> small(3);
  const TableVector<std::int64_t> large(huge_page_bytes / sizeof(std::int64_t));
  EXPECT_TRUE(begins_at_multiple_of(small.data(), 64));
  EXPECT_TRUE(begins_at_multiple_of(large.data(), huge_page_bytes));
}

TEST(table_allocator, tables_start_as_zeros_and_keep_what_is_written) {
  TableVector<std::int64_t> table(huge_page_bytes / 4 + 3);
  EXPECT_EQ(std::accumulate(table.begin(), table.end(), std::int64_t{0}), 0);
  table.back() = 7;
  table.resize(table.size() * 2);
  EXPECT_EQ(std::accumulate(table.begin(), table.end(), std::int64_t{0}), 7);
  EXPECT_EQ(TableVector<std::int64_t>(table), table);
}

TEST(table_allocator, refuses_more_than_any_memory_holds) {
  TableAllocator<std::int64_t> allocator;
  EXPECT_THROW(std::ignore = allocator.allocate(std::numeric_limits<std::size_t>::max() / 4),
               std::bad_alloc);
}

}  // namespace
}  // namespace waybill::detail
