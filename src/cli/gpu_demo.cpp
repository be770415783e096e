#include "gpu_demo.h"

#ifdef WAYBILL_CLI_CUDA
#include <array>

#include "cuda/self_test/self_test.h"
#include "report/format.h"
#include "waybill/core/wait.h"
#include "waybill/cuda/gpu_world.h"
#endif

namespace waybill::cli {

#ifdef WAYBILL_CLI_CUDA
namespace {

using Cells = std::array<std::string, 7>;
constexpr std::array<std::size_t, 7> widths{13, 13, 13, 11, 11, 11, 0};

std::string line_of(const Cells& cells) {
  std::string line = "  ";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    line += cells[i];
    const std::size_t gap = cells[i].size() < widths[i] ? widths[i] - cells[i].size() : 1;
    if (i + 1 < cells.size()) line.append(gap, ' ');
  }
  return line + "\n";
}

std::string step_line(const GpuSelfTest& self_test, const GpuSelfTestStep& step, Console& console) {
  const double limit_us = self_test.limit_us(step);
  const bool right = step.elements_wrong == 0;
  const std::string wrong =
      right ? "" : concat(", ", format_count(step.elements_wrong), " elements wrong");
  return line_of({step.name, format_bytes(step.link_bytes), format_bytes(step.local_bytes),
                  format_seconds(limit_us * 1e-6), format_seconds(step.median_us * 1e-6),
                  concat(format_fixed(100 * limit_us / step.median_us, 0), " %"),
                  concat(console.mark(right), " ", format_bytes(step.bytes_checked), wrong)});
}

}  // namespace

std::int32_t require_gpus() {
  const int gpus = num_gpus();
  if (gpus == 0) throw Unsupported("demo --gpus: there is no GPU, or no driver for it");
  return gpus;
}

bool run_gpu_demo(const QkvRouting& routing, const RowOptions& rows, int num_sms,
                  Console& console) {
  const DType dtype = dtype_from_name(rows.dtype);
  GpuSelfTest self_test;
  {
    const Progress progress(console, "the plan on the GPUs");
    const EndWaitsOnSigint guard;
    self_test =
        try_on_gpus(routing, {dtype, rows.q_hidden}, {dtype, rows.kv_hidden}, {.num_sms = num_sms});
  }
  console.print(concat(
      "\nOn the GPUs: ", format_plural(self_test.world_size, "rank"), " on ",
      format_plural(self_test.num_gpus, "GPU"), ", ", num_sms,
      " multiprocessors per rank. Measured now: ",
      self_test.num_gpus > 1
          ? concat("links ", format_fixed(self_test.link_gb_s, 0), " GB/s per GPU and direction, ")
          : "",
      "a copy on one GPU ", format_fixed(self_test.local_gb_s, 0), " GB/s, read and written.\n"));
  console.print(line_of({"", "over a link", "stay", "limit", "measured", "achieved", "compared"}));
  for (const GpuSelfTestStep& step : self_test.steps)
    console.print(step_line(self_test, step, console));
  console.print(
      "  over a link: the most bytes that one GPU sends to, or gets from, the others; stay: that "
      "are\n  copied on one GPU; limit: what takes longer at these rates; measured: the slowest "
      "rank's\n  median of 20 calls.\n");
  return self_test.passed();
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

bool run_gpu_demo(const QkvRouting& /*routing*/, const RowOptions& /*rows*/, int /*num_sms*/,
                  Console& /*console*/) {
  refuse();
}
#endif

}  // namespace waybill::cli
