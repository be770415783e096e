#include <unistd.h>

#include <algorithm>
#include <memory>

#include "main_job.h"
#include "numbers.h"
#include "report/format.h"

namespace waybill::cli {
namespace {

// What the check keeps in memory at the same time.
struct Footprint {
  double written_rows = 0;  // of K and V: at home, in the attention layout, and back in planes
  double plane_rows = 0;    // places in the planes; one nobody writes costs only its number

  [[nodiscard]] double bytes(std::int64_t payload_bytes) const {
    return written_rows * static_cast<double>(payload_bytes) + plane_rows * sizeof(std::int64_t);
  }
};

Footprint footprint(const QkvPlan& plan, const QkvRouting& routing) {
  Footprint result;
  for (std::size_t rank = 0; rank + 1 < plan.rank_shard_offsets.size(); ++rank) {
    double home_rows = 0;
    std::int64_t most_copies = 0;
    const std::int64_t end = plan.rank_shard_offsets[rank + 1];
    for (std::int64_t n = plan.rank_shard_offsets[rank]; n < end; ++n) {
      const auto rows = static_cast<double>(plan.shard_len[static_cast<std::size_t>(n)]);
      const std::int64_t copies =
          routing.fwd_kv.destination_end(n) - routing.fwd_kv.destination_begin(n);
      home_rows += rows;
      result.written_rows += rows * static_cast<double>(1 + 2 * copies);
      most_copies = std::max(most_copies, copies);
    }
    result.plane_rows += home_rows * static_cast<double>(most_copies);
  }
  return result;
}

std::int64_t choose_payload(const std::string& wanted, const Footprint& memory) {
  if (wanted != "auto") return parse_number(wanted).value();
  constexpr double budget_bytes = 0x1p30;
  std::int64_t payload = 256;
  while (payload > 16 && memory.bytes(payload) > budget_bytes) payload /= 2;
  return payload;
}

void check_memory(const Footprint& memory, std::int64_t payload_bytes) {
  const double machine =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  const double needed = memory.bytes(payload_bytes);
  if (needed <= 0.8 * machine) return;
  throw Unsupported(concat("the byte-checked run needs about ", format_si(needed),
                           "B of memory, this machine has ", format_si(machine),
                           "B; ask for fewer tokens or ranks, a smaller --payload-bytes, or leave "
                           "it out (demo --no-simulate)"));
}

}  // namespace

DispatchCheck run_checked(const QkvPlan& plan, const QkvRouting& routing,
                          const SimulationOptions& options, const Console& console,
                          std::int64_t& payload_bytes) {
  const Footprint memory = footprint(plan, routing);
  payload_bytes = choose_payload(options.payload_bytes, memory);
  check_memory(memory, payload_bytes);
  CheckOptions check;
  check.q_row_bytes = payload_bytes;
  check.kv_row_bytes = payload_bytes;
  check.num_threads = options.num_threads;
  std::unique_ptr<Progress> progress;
  check.progress = [&](std::string_view phase, int done, int total) {
    progress.reset();
    if (done < total)
      progress =
          std::make_unique<Progress>(console, concat("[", done + 1, "/", total, "] ", phase));
  };
  return check_dispatch(plan, routing, check);
}

}  // namespace waybill::cli
