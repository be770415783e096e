#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "core/printable.h"
#include "json/text.h"
#include "options.h"
#include "program.h"
#include "report/format.h"
#include "transport/bootstrap/tcp/socket.h"
#include "transport/peer_transport.h"
#include "waybill/transport/bootstrap.h"

#ifdef WAYBILL_CLI_CUDA
#include "cuda/gpu_report.h"
#include "cuda/self_test/self_test.h"
#endif

namespace waybill::cli {
namespace {

/// One line of `waybill doctor`.
struct CheckLine {
  std::string name;
  std::string value;
  std::string advice = {};  ///< empty: nothing to do
  bool works = true;        ///< false: it is there and does not work; with advice

  [[nodiscard]] const char* state() const {
    if (!works) return "problem";
    return advice.empty() ? "good" : "note";
  }
};

bool has_problem(const std::vector<CheckLine>& lines) {
  return std::ranges::any_of(lines, [](const CheckLine& line) { return !line.works; });
}

constexpr const char* shared_folder = "/dev/shm";
constexpr std::int64_t min_shared_bytes = std::int64_t{256} << 20;
constexpr std::int64_t enough_descriptors = 1024;

std::optional<std::int64_t> number_of(rlim_t limit) {
  if (limit == RLIM_INFINITY) return std::nullopt;
  return static_cast<std::int64_t>(limit);
}

std::string text_of(std::optional<std::int64_t> limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

/// None where the name is not known.
std::vector<std::string> addresses_of(const std::string& name) {
  try {
    return detail::addresses_of(name);
  } catch (const TransportError&) {
    return {};
  }
}

CheckLine host_name_line(const std::string& name, const std::vector<std::string>& addresses) {
  const std::string host = printable_line(name);
  if (addresses.empty())
    return {"host name", host + ", which resolves to no address",
            "other hosts cannot meet here by this name: give them an address in MASTER_ADDR "
            "or WAYBILL_RENDEZVOUS, or add the name to /etc/hosts"};
  if (!std::ranges::all_of(addresses, detail::is_loopback))
    return {"host name", concat(host, " -> ", addresses.front())};
  return {"host name", concat(host, " -> ", addresses.front(), " (loopback)"),
          "rank 0 of this name then listens on all addresses; other hosts need an address "
          "that leads here, in MASTER_ADDR or WAYBILL_RENDEZVOUS, and gloo and NCCL the "
          "interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"};
}

/// A line for a limit in force and the most that it may be raised to; nothing: without limit.
CheckLine descriptor_line(std::optional<std::int64_t> limit, std::optional<std::int64_t> most) {
  CheckLine line{"open files",
                 concat("at most ", text_of(limit), " (ulimit -n)",
                        limit == most ? "" : concat(", can be raised to ", text_of(most)))};
  if (!limit || *limit > enough_descriptors) return line;
  line.advice = concat(
      "rank 0 of a rendezvous over TCP needs one a rank, processes that share "
      "memory one a rank each: for more than about ",
      *limit - *limit / 8, " ranks, ulimit -n ", most ? text_of(most) : "65536");
  return line;
}

CheckLine memlock_line(std::optional<std::int64_t> limit_bytes) {
  if (!limit_bytes) return {"locked memory", "unlimited"};
  constexpr std::int64_t enough = std::int64_t{1} << 30;
  return {"locked memory", concat("at most ", format_bytes(*limit_bytes), " (ulimit -l)"),
          *limit_bytes >= enough
              ? ""
              : "RDMA (NVSHMEM, NCCL over InfiniBand) locks memory: ulimit -l unlimited, in "
                "containers --ulimit memlock=-1"};
}

CheckLine check_shared_memory(std::int64_t num_cores) {
  struct statvfs facts {};
  if (statvfs(shared_folder, &facts) != 0 || access(shared_folder, W_OK) != 0) {
    return {"shared memory", concat(shared_folder, " cannot be written"),
            "mount a tmpfs there (containers: --shm-size or --ipc=host): worlds of processes in "
            "host memory need it",
            false};
  }
  const auto block = static_cast<std::int64_t>(facts.f_frsize);
  const std::int64_t free_bytes = static_cast<std::int64_t>(facts.f_bavail) * block;
  CheckLine line{"shared memory",
                 concat(shared_folder, ": ", format_bytes(free_bytes), " free of ",
                        format_bytes(static_cast<std::int64_t>(facts.f_blocks) * block))};
  if (free_bytes < min_shared_bytes) {
    line.advice = concat("worlds of processes in host memory keep the windows of all ranks there (",
                         num_cores,
                         " cores here); make it larger: docker run --shm-size=16g, or --ipc=host, "
                         "or mount -o remount,size=16g ",
                         shared_folder);
  }
  return line;
}

/// WAYBILL_PEER_ACCESS, if it is set, as worlds on GPUs read it.
void check_peer_access_wish(std::vector<CheckLine>& lines) {
  constexpr const char* name = "WAYBILL_PEER_ACCESS";
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return;
  CheckLine& line = lines.emplace_back(CheckLine{name, printable_line(text)});
  try {
    (void)peer_access_wish(text);
  } catch (const Error& error) {
    line.advice = error.what();
    line.works = false;
  }
}

std::vector<CheckLine> check_host() {
  const auto cores = static_cast<std::int64_t>(std::thread::hardware_concurrency());
  std::vector<CheckLine> lines;
  lines.push_back({"cores", std::to_string(cores)});
  lines.push_back(check_shared_memory(cores));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    lines.push_back(descriptor_line(number_of(limit.rlim_cur), number_of(limit.rlim_max)));
  }
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    lines.push_back(memlock_line(number_of(limit.rlim_cur)));
  }
  std::array<char, 256> name{};
  (void)gethostname(name.data(), name.size() - 1);
  lines.push_back(host_name_line(name.data(), addresses_of(name.data())));
  check_peer_access_wish(lines);
  return lines;
}

std::vector<CheckLine> check_python(const Options& facts) {
  if (facts.python.empty()) return {};
  const CheckLine python{"Python", printable_line(facts.python)};
  if (!facts.torch.empty()) return {python, {"torch", printable_line(facts.torch)}};
  return {python,
          {"torch", "not installed",
           "waybill.torch needs it; for GPUs a build for CUDA 13: pip install torch"}};
}

/// GPUs that NVIDIA's driver has, whatever this program was built with.
std::int64_t num_driver_gpus() {
  std::error_code ignored;
  const std::filesystem::directory_iterator folder("/proc/driver/nvidia/gpus", ignored);
  return std::distance(begin(folder), end(folder));
}

#ifdef WAYBILL_CLI_CUDA

CheckLine driver_line(const GpuReport& report) {
  CheckLine line{"CUDA", concat("built with ", report.runtime, ", driver for ",
                                report.driver.empty() ? "none" : report.driver)};
  if (!report.gpus.empty()) return line;
  const std::int64_t of_driver = num_driver_gpus();
  const std::string trouble = driver_trouble();
  line.works = of_driver == 0 && trouble.empty();
  if (!trouble.empty()) {
    line.advice = trouble;
  } else if (line.works) {
    line.advice = "no GPU here: ranks run in host memory";
  } else {
    line.advice = concat("the driver has ", of_driver,
                         " GPU(s) that CUDA does not show: a driver for CUDA ", report.runtime,
                         " or later is needed (R580), and in containers --gpus all; look at "
                         "CUDA_VISIBLE_DEVICES");
  }
  return line;
}

/// Advice for a GPU on which this code has not run; empty: it has.
std::string untried(const GpuFacts& gpu) {
  if (gpu.major == 9) return {};
  return concat("the code for compute capability ", gpu.major, ".", gpu.minor,
                " was compiled, not run, by those who wrote it: python -m waybill selftest");
}

CheckLine gpu_line(const GpuFacts& gpu) {
  // The first line of an error, as what follows lists all that was tried.
  return {concat("GPU ", gpu.device),
          concat(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor, ", ", gpu.num_sms,
                 " multiprocessors, ", format_bytes(gpu.memory_bytes), ", ",
                 gpu.bulk_copies ? "bulk copies" : "no bulk copies (vector path)"),
          gpu.trouble.empty() ? untried(gpu) : gpu.trouble.substr(0, gpu.trouble.find('\n')),
          gpu.trouble.empty()};
}

/// GPUs of this machine that this process does not see.
std::vector<CheckLine> unseen_lines(const GpuReport& report) {
  const std::int64_t unseen = num_driver_gpus() - std::ssize(report.gpus);
  if (report.gpus.empty() || unseen <= 0) return {};
  return {{"other GPUs", concat(unseen, " more that this process does not see"),
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
    lines.push_back({concat("peers of ", from), row.substr(1)});
  }
  if (!all) {
    lines.push_back({"peer access", "not between all GPUs (.)",
                     "worlds of this host move their rows through pinned memory of the host "
                     "instead, at the speed of PCIe; several hosts over NCCL are refused; IOMMU "
                     "and ACS settings, or a container without all GPUs, often are the reason "
                     "(nvidia-smi topo -p2p rw)"});
  }
  return lines;
}

CheckLine nccl_line(const GpuReport& report) {
  if (!report.nccl.empty()) return {"NCCL", report.nccl};
  return {"NCCL", "not found",
          "needed between hosts: pip install nvidia-nccl-cu13, and name "
          "its file in WAYBILL_NCCL_LIBRARY unless torch has loaded it"};
}

CheckLine nvshmem_line(const GpuReport& report) {
  if (report.nvshmem) return {"NVSHMEM", "found"};
  // The last one tried: NVSHMEM itself, or the library that Waybill is built with for it.
  const std::string& text = report.nvshmem_trouble;
  const std::size_t last = text.rfind('\n');
  return {
      "NVSHMEM",
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
  lines.push_back(
      {"memory", concat("a copy on GPU 0 reads and writes ",
                        format_fixed(local_copy_gb_s(std::int64_t{1} << 30), 0), " GB/s")});
  const bool reaches_all = std::ranges::all_of(report.peer_access, [](const auto& row) {
    return std::ranges::find(row, false) == row.end();
  });
  if (gpus < 2 || !reaches_all) return lines;
  const auto rate = [&](LinkWay way, int sms) {
    return concat(format_fixed(link_gb_s(gpus, way, sms, bytes), 0), " GB/s");
  };
  lines.push_back(
      {"links", concat("each GPU to all others at once, 64 MiB a peer: push ",
                       rate(LinkWay::push_bulk, 16), ", pull ", rate(LinkWay::pull_bulk, 16),
                       ", copy engines ", rate(LinkWay::copy_engines, 1))});
  return lines;
}

/// GPUs, peer access, NCCL and NVSHMEM. @param measure also the rates of links and memory
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
  if (measure && !has_problem(lines) && !report.gpus.empty()) {
    std::ranges::copy(measured_lines(report), std::back_inserter(lines));
  }
  return lines;
}
#else
std::vector<CheckLine> check_gpus(bool measure) {
  if (measure) {
    throw Unsupported("doctor --measure: this program was built without CUDA, and measures GPUs");
  }
  const std::int64_t gpus = num_driver_gpus();
  return {{"CUDA", "built without it",
           gpus == 0 ? "ranks run in host memory, and no GPU is here"
                     : concat("there are ", gpus,
                              " GPU(s): install CUDA 13 and build with -DWAYBILL_CUDA=ON (pip: it "
                              "is found by itself)")}};
}
#endif

std::string as_json(const std::vector<CheckLine>& lines) {
  detail::JsonWriter writer(JsonStyle::readable);
  writer.open_object().header("waybill.doctor");
  writer.key("release").string(WAYBILL_VERSION);
  writer.key("host_id").string(host_id());
  writer.key("works").boolean(!has_problem(lines));
  writer.key("checks").open_list();
  for (const CheckLine& line : lines) {
    writer.open_object(true);
    writer.key("name").string(line.name).key("state").string(line.state());
    writer.key("value").string(line.value);
    if (!line.advice.empty()) writer.key("advice").string(line.advice);
    writer.close();
  }
  writer.close().close();
  return std::move(writer).finish();
}

/// A name and its value, in lines as wide as the terminal.
std::string table_line(const std::string& name, const std::string& value) {
  const std::size_t room =
      std::max<std::size_t>(text_width() - std::min(text_width(), name.size()), 16);
  return concat(name, detail::wrapped(value, room, std::string(name.size(), ' ')), "\n");
}

std::string as_text(const std::vector<CheckLine>& lines) {
  std::size_t width = 0;
  for (const CheckLine& line : lines) width = std::max(width, line.name.size());
  std::string text = concat("waybill ", WAYBILL_VERSION, " on this host\n");
  std::vector<std::string> advice;
  for (const CheckLine& line : lines) {
    const char* const mark = !line.works ? "! " : line.advice.empty() ? "  " : "- ";
    text += table_line(concat(mark, line.name, std::string(width - line.name.size() + 2, ' ')),
                       line.value);
    if (!line.advice.empty()) advice.push_back(concat(line.name, ": ", line.advice));
  }
  if (!advice.empty()) text += concat("\nWhat to do\n", sentence_list(advice));
  return concat(
      text, "\n",
      table_line("", has_problem(lines) ? "Something here does not work (!)."
                                        : "Everything that was found works; a line with - "
                                          "matters only if you need it."));
}

int run_doctor(const Options& options, Command /*command*/, Program& program) {
  std::vector<CheckLine> lines = check_host();
  std::ranges::copy(check_python(options), std::back_inserter(lines));
  const auto gpus = with_progress(program.console, options.measure ? "measuring" : "asking",
                                  [&] { return check_gpus(options.measure); });
  std::ranges::copy(gpus, std::back_inserter(lines));
  program.console.print(options.json ? as_json(lines) : as_text(lines));
  return has_problem(lines) ? exit_failure : exit_good;
}

}  // namespace

void add_doctor_command(Command app, Program& program) {
  auto [command, options] = add_command(
      app, program, "doctor",
      "Checks what ranks need on this machine, and says what to do about what is missing: GPUs, "
      "peer access, NCCL, NVSHMEM, shared memory, limits, how the host name resolves.",
      run_doctor);
  command.flag("--json", options.json, "Print JSON");
  command.flag(
      "--measure", options.measure,
      "Also measure the links and memory of the GPUs, which must be idle; takes a few seconds");
  command
      .option("--python", options.python, "Version of Python to show; python -m waybill passes it")
      .value_name("TEXT");
  command.option("--torch", options.torch, "Version of torch to show; python -m waybill passes it")
      .value_name("TEXT");
  command.footer(
      "Exit: 0 everything that was found works, 1 something that was found does not.\n\n"
      "Examples:\n"
      "  waybill doctor\n"
      "  python -m waybill doctor       with the versions of Python and torch\n"
      "  waybill doctor --measure --json");
}

}  // namespace waybill::cli
