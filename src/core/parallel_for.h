#pragma once

#include <cstdint>
#include <functional>

namespace waybill {

/// The number of threads that `num_threads = 0` stands for: one per core that this process may use.
[[nodiscard]] int default_num_threads();

/// Calls body(begin, end) on disjoint chunks that cover [0, num_items), on up to `num_threads`
/// threads (0: all cores), the caller's among them. No chunk is smaller than `grain`, so small
/// work stays on the caller's thread. Chunks run in no particular order; the first exception is
/// rethrown after all threads have ended.
void parallel_for(std::int64_t num_items, std::int64_t grain, int num_threads,
                  const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace waybill
