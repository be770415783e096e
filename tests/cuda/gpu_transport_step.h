#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/device_arena.h"
#include "waybill/runtime/world.h"

namespace waybill::test {

/// Every rank puts a number to every rank and raises its slot there, again and again.
inline void check_gpu_puts_and_signals(World& world) {
  const std::int32_t world_size = world.world_size();
  Transport& transport = world.transport();
  const std::int32_t me = to_int(world.rank());
  SymmetricBuffer buffer = transport.allocate(world_size * 8, "test");
  SignalPad pad = transport.allocate_signals(world_size, "test");
  DeviceArena arena(world, 1 << 20);
  const TensorView value = arena.take(DType::uint64, {1});
  for (std::uint64_t epoch = 1; epoch <= 20; ++epoch) {
    const std::uint64_t mine = epoch * 100 + static_cast<std::uint64_t>(me);
    arena.copy(value.data, &mine, sizeof(mine));
    arena.synchronize();
    for (std::int32_t r = 0; r < world_size; ++r) {
      transport.put_signal(buffer, {Rank{r}, me * 8, value.data, 8}, {&pad, me}, epoch);
    }
    transport.quiet();
    for (std::int32_t r = 0; r < world_size; ++r) {
      ASSERT_EQ(transport.wait({&pad, r}, epoch, Rank{r}, "test"), epoch);
      std::uint64_t got = 0;
      arena.read(&got, buffer.local + r * 8, sizeof(got));
      ASSERT_EQ(got, epoch * 100 + static_cast<std::uint64_t>(r));
    }
    transport.barrier("all have read");
  }
  transport.release(buffer);
  transport.release(pad);
}

}  // namespace waybill::test
