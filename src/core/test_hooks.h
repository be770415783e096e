#pragma once

#include <cstdint>
#include <string_view>

namespace waybill::detail {

/// Changes inside the product for tests, by WAYBILL_TEST="name=value,name=value" in the
/// environment. 0 everywhere: nothing.
struct TestHooks {
  std::int64_t delay_ns = 0;          ///< kernels of experts pause at random, up to so long
  std::int64_t late_streams = 0;      ///< seed: streams of the tests come late, at random
  std::int64_t max_shared_kb = 0;     ///< shared memory of a block, as on a device with less
  std::int64_t no_bulk_copies = 0;    ///< 1: as on a device without them
  std::int64_t unseen_gpus = 0;       ///< 1: no process sees the GPU of another
  std::int64_t unmappable_gpus = 0;   ///< 1: nor can it map that GPU's memory
  std::int64_t nvshmem_enforces = 0;  ///< 1: NVSHMEM says that it enforces consistency
  std::int64_t copy_stage_kb = 0;     ///< stage of copies of experts that cross a network
};

/// @param hooks those that the text leaves as they are
/// @throws InvalidArgument naming all hooks and their values, if one is unknown or wrong
[[nodiscard]] TestHooks parse_test_hooks(std::string_view text, TestHooks hooks = {});

/// The hooks of this process; the environment is read once. @throws as parse_test_hooks
[[nodiscard]] const TestHooks& test_hooks();

/// Lets tests and benches of this process choose hooks. Not while others read them.
/// @param hooks null: those of the environment
/// @return what was chosen before
const TestHooks* replace_test_hooks(const TestHooks* hooks);

}  // namespace waybill::detail
