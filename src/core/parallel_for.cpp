#include "core/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include "waybill/core/error.h"

namespace waybill {

int default_num_threads() {
#ifdef __linux__
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return std::max(1, CPU_COUNT(&cpus));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(std::int64_t num_items, std::int64_t grain, int num_threads,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  require(grain >= 1, "parallel_for: grain = ", grain, ", expected >= 1");
  require(num_threads >= 0, "parallel_for: num_threads = ", num_threads, ", expected >= 0");
  if (num_items <= 0) return;
  const std::int64_t max_threads = num_threads == 0 ? default_num_threads() : num_threads;
  const std::int64_t workers = std::min(max_threads, std::max<std::int64_t>(1, num_items / grain));
  if (workers == 1) {
    body(0, num_items);
    return;
  }
  // Several chunks a worker, so that one slow chunk does not hold the others up.
  const std::int64_t num_chunks = std::clamp(num_items / grain, workers, workers * 8);
  std::atomic<std::int64_t> next{0};
  std::exception_ptr first_error;
  std::mutex error_mutex;
  const auto work = [&] {
    for (std::int64_t c = next.fetch_add(1); c < num_chunks; c = next.fetch_add(1)) {
      try {
        // c * num_items would overflow for huge ranges; the remainder is spread over the first.
        const std::int64_t share = num_items / num_chunks;
        const std::int64_t rest = num_items % num_chunks;
        const std::int64_t begin = c * share + std::min(c, rest);
        body(begin, begin + share + (c < rest ? 1 : 0));
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!first_error) first_error = std::current_exception();
        next.store(num_chunks);
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(static_cast<std::size_t>(workers - 1));
    for (std::int64_t i = 1; i < workers; ++i) threads.emplace_back(work);
    work();
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace waybill
