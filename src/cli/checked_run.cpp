#include <unistd.h>

#include <algorithm>
#include <memory>

#include "main_job.h"
#include "numbers.h"
#include "waybill/report/format.h"

namespace waybill::cli {
namespace {

// Rows of the buffers that are in memory at the same time. The planes of the KV gradient have a
// place for every copy that a shard may have, also for those that it has not.
double rows_in_memory(const QkvPlan& plan, const QkvRouting& routing) {
  double tokens = 0;
  double kv_rows = 0;
  std::int64_t most_copies = 1;
  for (std::int64_t line = 0; line < plan.num_shards(); ++line) {
    const auto rows = static_cast<double>(plan.shard_len[static_cast<std::size_t>(line)]);
    const std::int64_t copies = routing.fwd_kv.copy_end(line) - routing.fwd_kv.copy_begin(line);
    tokens += rows;
    kv_rows += rows * static_cast<double>(copies);
    most_copies = std::max(most_copies, copies);
  }
  return tokens + kv_rows + static_cast<double>(most_copies) * tokens;
}

std::int64_t choose_payload(const std::string& wanted, double rows) {
  if (wanted != "auto") return parse_number(wanted).value();
  constexpr double budget_bytes = 0x1p30;
  std::int64_t payload = 256;
  while (payload > 16 && static_cast<double>(payload) * rows > budget_bytes) payload /= 2;
  return payload;
}

void check_memory(double rows, std::int64_t payload_bytes) {
  const double machine =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  const double needed = rows * static_cast<double>(payload_bytes + 8);
  if (needed <= 0.8 * machine) return;
  throw Unsupported(concat("the byte-checked run needs about ", format_si(needed),
                           "B of memory, this machine has ", format_si(machine),
                           "B; ask for fewer tokens or ranks, a smaller --payload-bytes, or only "
                           "the plan"));
}

}  // namespace

DispatchCheck run_checked(const QkvPlan& plan, const QkvRouting& routing,
                          const SimulationOptions& options, const Console& console,
                          std::int64_t& payload_bytes) {
  const double rows = rows_in_memory(plan, routing);
  payload_bytes = choose_payload(options.payload_bytes, rows);
  check_memory(rows, payload_bytes);
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
