#include "gpu_demo.h"

#ifdef WAYBILL_CLI_CUDA
#include <array>

#include "waybill/cuda/gpu_trial.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/report/format.h"
#endif

namespace waybill::cli {

#ifdef WAYBILL_CLI_CUDA
namespace {

constexpr std::array<std::size_t, 6> widths{13, 13, 11, 11, 11, 0};

std::string line_of(const std::array<std::string, 6>& cells) {
  std::string line = "  ";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    line += cells[i];
    const std::size_t gap = cells[i].size() < widths[i] ? widths[i] - cells[i].size() : 1;
    if (i + 1 < cells.size()) line.append(gap, ' ');
  }
  return line + "\n";
}

std::string rate_text(const GpuTrialStep& step) {
  return concat(format_fixed(static_cast<double>(step.moved_bytes) / step.median_us / 1e3, 0),
                " GB/s");
}

std::string step_line(const GpuTrialStep& step, double link_gb_s, Console& console) {
  const double limit_us = step.limit_us(link_gb_s);
  const bool right = step.elements_wrong == 0;
  const std::string checked =
      concat(console.mark(right), " ", format_bytes(step.bytes_checked),
             right ? "" : concat(", ", format_count(step.elements_wrong), " elements wrong"));
  const bool limited = limit_us > 0;
  return line_of(
      {step.name, format_bytes(step.link_bytes), limited ? format_seconds(limit_us * 1e-6) : "-",
       format_seconds(step.median_us * 1e-6),
       limited ? concat(format_fixed(100 * limit_us / step.median_us, 0), " %") : rate_text(step),
       checked});
}

}  // namespace

std::int32_t require_gpus() {
  const int gpus = num_gpus();
  if (gpus == 0) throw Unsupported("demo --gpus: there is no GPU, or no driver for it");
  return gpus;
}

bool run_gpu_demo(const QkvRouting& routing, const RowOptions& rows, Console& console) {
  const DType dtype = dtype_from_name(rows.dtype);
  GpuTrial trial;
  {
    const Progress progress(console, "the plan on the GPUs");
    trial = try_on_gpus(routing, {dtype, rows.q_hidden}, {dtype, rows.kv_hidden});
  }
  console.print(concat("\nOn the GPUs: ", format_plural(trial.world_size, "rank"), " on ",
                       format_plural(trial.num_gpus, "GPU")));
  if (trial.num_gpus > 1) {
    console.print(concat("; their links move ", format_fixed(trial.link_gb_s, 0),
                         " GB/s a GPU and direction, measured now.\n"));
  } else {
    console.print("; with one GPU no link limits, and achieved counts all bytes moved.\n");
  }
  console.print(line_of({"", "over a link", "limit", "measured", "achieved", "compared"}));
  for (const GpuTrialStep& step : trial.steps) {
    console.print(step_line(step, trial.link_gb_s, console));
  }
  console.print(
      "  over a link: the most bytes that one GPU sends to, or gets from, the others; limit: these "
      "at the\n  links' rate; measured: the slowest rank's median of 20 calls.\n");
  return trial.passed();
}
#else
namespace {

[[noreturn]] void refuse() {
  throw Unsupported(
      "demo --gpus: this program was built without CUDA; with CUDA 13: scripts/demo.sh --gpus, or "
      "cmake -DWAYBILL_CUDA=ON");
}

}  // namespace

std::int32_t require_gpus() { refuse(); }

bool run_gpu_demo(const QkvRouting& /*routing*/, const RowOptions& /*rows*/, Console& /*console*/) {
  refuse();
}
#endif

}  // namespace waybill::cli
