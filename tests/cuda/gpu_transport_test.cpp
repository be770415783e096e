#include <gtest/gtest.h>

#include "cuda/gpu_transport_step.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill {
namespace {

TEST(GpuThreadTransport, puts_and_signals_reach_every_peer) {
  run_gpu_thread_world(4, test::check_gpu_puts_and_signals, test::world_options());
}

}  // namespace
}  // namespace waybill
