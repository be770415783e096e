// Tables of symmetric memory, as worlds on GPUs have them, here in host memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/to_size.h"
#include "transport/host_transport.h"
#include "transport/share_memory.h"
#include "waybill/runtime/world.h"

namespace waybill {
namespace {

using detail::to_size;

/// Has a table with all memory.
class TableTransport final : public detail::HostTransport {
 public:
  explicit TableTransport(std::shared_ptr<Bootstrap> bootstrap)
      : HostTransport(std::move(bootstrap), 0, false) {}

 private:
  Parts make_parts(std::int64_t size_bytes, std::string_view name) override {
    auto own = std::make_shared<std::vector<std::byte>>(size_bytes);
    return share_memory(bootstrap(), {own, own->data()}, size_bytes, name);
  }
  std::shared_ptr<void> make_table(const Parts& parts, std::string_view /*name*/) override {
    auto table = std::make_shared<std::vector<void*>>();
    for (const auto& part : parts) table->push_back(part.get());
    return {table, table->data()};
  }
};

template <class Symmetric>
void expect_table(const Symmetric& memory, std::int32_t world_size) {
  ASSERT_EQ(std::ssize(memory.memory), world_size + 1);  // whoever keeps it keeps the table
  ASSERT_EQ(static_cast<const void*>(memory.table), memory.memory.back().get());
  for (std::size_t r = 0; r < to_size(world_size); ++r) {
    ASSERT_EQ(memory.table[r], memory.peers[r]) << r;
  }
}

void check_tables(std::int32_t world_size) {
  run_ranks_as_threads(
      world_size,
      [&](std::shared_ptr<Bootstrap> bootstrap) {
        TableTransport transport(std::move(bootstrap));
        SymmetricBuffer buffer = transport.allocate(16, "buffer");
        SignalPad pad = transport.allocate_signals(2, "pad");
        expect_table(buffer, world_size);
        expect_table(pad, world_size);
        const std::weak_ptr<void> table = buffer.memory.back();
        // What another generation makes does not change this one.
        const std::vector<std::byte*> before(buffer.table, buffer.table + world_size);
        SymmetricBuffer larger = transport.allocate(32, "larger");
        ASSERT_TRUE(std::equal(before.begin(), before.end(), buffer.table));
        ASSERT_NE(larger.table, buffer.table);
        transport.release(buffer);
        ASSERT_TRUE(table.expired());
        transport.release(larger);
        transport.release(pad);
      },
      240);
}

TEST(memory_table, of_many_ranks_lives_as_long_as_the_memory) {
  for (const std::int32_t world_size : {1, 3, 128}) check_tables(world_size);
}

TEST(memory_table, is_not_there_where_nobody_needs_it) {
  run_ranks_as_threads(
      2,
      [&](std::shared_ptr<Bootstrap> bootstrap) {
        const auto transport = make_thread_transport(std::move(bootstrap));
        SymmetricBuffer buffer = transport->allocate(16, "buffer");
        ASSERT_EQ(buffer.table, nullptr);
        ASSERT_EQ(buffer.memory.size(), 2U);
        transport->release(buffer);
      },
      240);
}

}  // namespace
}  // namespace waybill
