#include <algorithm>
#include <filesystem>

#include "checkup.h"
#include "waybill/core/error.h"

#ifdef WAYBILL_CLI_CUDA
#include "core/printable.h"
#include "cuda/gpu_report.h"
#include "cuda/self_test/self_test.h"
#include "report/format.h"
#endif

namespace waybill::cli {
namespace {

/// GPUs that NVIDIA's driver has, whatever this program was built with.
std::int64_t num_driver_gpus() {
  std::error_code ignored;
  const std::filesystem::directory_iterator folder("/proc/driver/nvidia/gpus", ignored);
  return std::distance(begin(folder), end(folder));
}

#ifdef WAYBILL_CLI_CUDA

/// The first line of an error, as what follows lists all that was tried.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

CheckLine driver_line(const GpuReport& report) {
  CheckLine line{"CUDA", Diagnosis::good,
                 concat("built with ", report.runtime, ", driver for ",
                        report.driver.empty() ? "none" : report.driver)};
  if (!report.gpus.empty()) return line;
  const std::int64_t of_driver = num_driver_gpus();
  if (of_driver == 0) {
    line.state = Diagnosis::note;
    line.advice = "no GPU here: ranks run in host memory";
  } else {
    line.state = Diagnosis::problem;
    line.advice = concat("the driver has ", of_driver,
                         " GPU(s) that CUDA does not show: a driver for CUDA ", report.runtime,
                         " or later is needed (R580), and in containers --gpus all; look at "
                         "CUDA_VISIBLE_DEVICES");
  }
  return line;
}

CheckLine gpu_line(const GpuFacts& gpu) {
  CheckLine line{concat("GPU ", gpu.device), Diagnosis::good,
                 concat(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor, ", ",
                        gpu.num_sms, " multiprocessors, ", format_bytes(gpu.memory_bytes), ", ",
                        gpu.bulk_copies ? "bulk copies" : "no bulk copies (vector path)")};
  if (!gpu.trouble.empty()) {
    line.state = Diagnosis::problem;
    line.advice = first_line(gpu.trouble);
  }
  return line;
}

/// GPUs of this machine that this process does not see.
std::vector<CheckLine> unseen_lines(const GpuReport& report) {
  const std::int64_t unseen = num_driver_gpus() - std::ssize(report.gpus);
  if (report.gpus.empty() || unseen <= 0) return {};
  return {{"other GPUs", Diagnosis::note, concat(unseen, " more that this process does not see"),
           "ranks on them find out whether they can map each other's memory when they make a "
           "world, and use pinned memory of the host where they cannot; CUDA_VISIBLE_DEVICES, or "
           "a container without all GPUs, is the reason"}};
}

/// A row of the matrix for each GPU.
std::vector<CheckLine> peer_lines(const GpuReport& report) {
  const std::size_t count = report.gpus.size();
  if (count < 2) return {};
  bool all = true;
  std::vector<CheckLine> lines;
  for (std::size_t from = 0; from < count; ++from) {
    std::string row;
    for (std::size_t to = 0; to < count; ++to) {
      const bool can = report.peer_access[from][to];
      row += from == to ? " -" : can ? " x" : " .";
      all = all && can;
    }
    lines.push_back({concat("peers of ", from), Diagnosis::good, row.substr(1)});
  }
  if (!all) {
    lines.push_back({"peer access", Diagnosis::note, "not between all GPUs (.)",
                     "worlds of this host move their rows through pinned memory of the host "
                     "instead, at the speed of PCIe; several hosts over NCCL are refused; IOMMU "
                     "and ACS settings, or a container without all GPUs, often are the reason "
                     "(nvidia-smi topo -p2p rw)"});
  }
  return lines;
}

CheckLine nccl_line(const GpuReport& report) {
  if (!report.nccl.empty()) return {"NCCL", Diagnosis::good, report.nccl};
  return {"NCCL", Diagnosis::note, "not found",
          "needed between hosts: pip install nvidia-nccl-cu13, and name "
          "its file in WAYBILL_NCCL_LIBRARY unless torch has loaded it"};
}

CheckLine nvshmem_line(const GpuReport& report) {
  if (report.nvshmem) return {"NVSHMEM", Diagnosis::good, "found"};
  // What was tried last: NVSHMEM itself, or the library that Waybill is built with for it.
  const std::string& text = report.nvshmem_trouble;
  const std::size_t last = text.rfind('\n');
  return {
      "NVSHMEM", Diagnosis::note,
      concat("did not load", last == text.npos ? "" : ": ",
             last == text.npos ? "" : printable_line(text.substr(std::min(last + 3, text.size())))),
      "only for make_nvshmem_world: pip install nvidia-nvshmem-cu13, its folder in "
      "NVSHMEM_HOME, and libwaybill_nvshmem.so, from a build with -DWAYBILL_NVSHMEM=ON, in "
      "WAYBILL_NVSHMEM_LIBRARY"};
}

std::vector<CheckLine> measured_lines(const GpuReport& report) {
  const auto gpus = static_cast<int>(report.gpus.size());
  constexpr std::int64_t bytes = std::int64_t{64} << 20;
  std::vector<CheckLine> lines;
  lines.push_back({"memory", Diagnosis::good,
                   concat("a copy on GPU 0 reads and writes ",
                          format_fixed(local_copy_gb_s(std::int64_t{1} << 30), 0), " GB/s")});
  const bool reaches_all = std::ranges::all_of(report.peer_access, [](const auto& row) {
    return std::ranges::find(row, false) == row.end();
  });
  if (gpus < 2 || !reaches_all) return lines;
  const auto rate = [&](LinkWay way, int sms) {
    return concat(format_fixed(link_gb_s(gpus, way, sms, bytes), 0), " GB/s");
  };
  lines.push_back({"links", Diagnosis::good,
                   concat("each GPU to all others at once, 64 MiB a peer: push ",
                          rate(LinkWay::push_bulk, 16), ", pull ", rate(LinkWay::pull_bulk, 16),
                          ", copy engines ", rate(LinkWay::copy_engines, 1))});
  return lines;
}
#endif

}  // namespace

#ifdef WAYBILL_CLI_CUDA
std::vector<CheckLine> check_gpus(bool measure) {
  const GpuReport report = report_gpus();
  std::vector<CheckLine> lines{driver_line(report)};
  for (const GpuFacts& gpu : report.gpus) lines.push_back(gpu_line(gpu));
  std::ranges::copy(peer_lines(report), std::back_inserter(lines));
  std::ranges::copy(unseen_lines(report), std::back_inserter(lines));
  if (!report.gpus.empty()) {
    lines.push_back(nccl_line(report));
    lines.push_back(nvshmem_line(report));
  }
  const bool works = std::ranges::all_of(
      lines, [](const CheckLine& line) { return line.state != Diagnosis::problem; });
  if (measure && works && !report.gpus.empty()) {
    std::ranges::copy(measured_lines(report), std::back_inserter(lines));
  }
  return lines;
}
#else
std::vector<CheckLine> check_gpus(bool measure) {
  if (measure) {
    throw Unsupported("doctor --measure: this program was built without CUDA, and measures GPUs");
  }
  CheckLine line{"CUDA", Diagnosis::note, "built without it"};
  const std::int64_t gpus = num_driver_gpus();
  line.advice = gpus == 0 ? "ranks run in host memory, and no GPU is here"
                          : concat("there are ", gpus,
                                   " GPU(s): install CUDA 13 and build with "
                                   "-DWAYBILL_CUDA=ON (pip: it is found by itself)");
  return {line};
}
#endif

}  // namespace waybill::cli
