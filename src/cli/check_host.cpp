#include <netdb.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <thread>

#include "checkup.h"
#include "core/printable.h"
#include "report/format.h"
#include "transport/peer_transport.h"
#include "waybill/core/error.h"

namespace waybill::cli {
namespace {

constexpr const char* shared_folder = "/dev/shm";
constexpr std::int64_t least_shared_bytes = std::int64_t{256} << 20;
constexpr std::int64_t least_descriptors = 1024;

std::optional<std::int64_t> number_of(rlim_t limit) {
  if (limit == RLIM_INFINITY) return std::nullopt;
  return static_cast<std::int64_t>(limit);
}

std::string text_of(std::optional<std::int64_t> limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

std::vector<std::string> addresses_of(const std::string& name) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  std::vector<std::string> addresses;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    std::array<char, NI_MAXHOST> text{};
    if (getnameinfo(at->ai_addr, at->ai_addrlen, text.data(), text.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
      continue;
    }
    if (std::ranges::find(addresses, text.data()) == addresses.end()) {
      addresses.emplace_back(text.data());
    }
  }
  return addresses;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

CheckLine check_shared_memory(std::int64_t num_cores) {
  struct statvfs facts {};
  if (statvfs(shared_folder, &facts) != 0 || access(shared_folder, W_OK) != 0) {
    return {"shared memory", Diagnosis::problem, concat(shared_folder, " cannot be written"),
            "mount a tmpfs there (containers: --shm-size or --ipc=host): worlds of processes in "
            "host memory need it"};
  }
  const auto block = static_cast<std::int64_t>(facts.f_frsize);
  return shared_memory_line(static_cast<std::int64_t>(facts.f_blocks) * block,
                            static_cast<std::int64_t>(facts.f_bavail) * block, num_cores);
}

/// WAYBILL_PEER_ACCESS, if it is set, as worlds on GPUs read it.
void check_peer_access_wish(std::vector<CheckLine>& lines) {
  constexpr const char* name = "WAYBILL_PEER_ACCESS";
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return;
  CheckLine& line = lines.emplace_back(CheckLine{name, Diagnosis::good, printable_line(text)});
  try {
    (void)peer_access_wish(text);
  } catch (const Error& error) {
    line.state = Diagnosis::problem;
    line.advice = error.what();
  }
}

}  // namespace

CheckLine shared_memory_line(std::int64_t size_bytes, std::int64_t free_bytes,
                             std::int64_t num_cores) {
  CheckLine line{
      "shared memory", Diagnosis::good,
      concat(shared_folder, ": ", format_bytes(free_bytes), " free of ", format_bytes(size_bytes))};
  if (free_bytes >= least_shared_bytes) return line;
  line.state = Diagnosis::note;
  line.advice =
      concat("worlds of processes in host memory keep the windows of all ranks there (", num_cores,
             " cores here); make it larger: docker run --shm-size=16g, or --ipc=host, or mount -o "
             "remount,size=16g ",
             shared_folder);
  return line;
}

CheckLine host_name_line(const std::string& name, const std::vector<std::string>& addresses) {
  CheckLine line{"host name", Diagnosis::good, printable_line(name)};
  if (addresses.empty()) {
    line.state = Diagnosis::note;
    line.value += ", which resolves to no address";
    line.advice =
        "other hosts cannot meet here by this name: give them an address in MASTER_ADDR "
        "or WAYBILL_RENDEZVOUS, or add the name to /etc/hosts";
    return line;
  }
  line.value += concat(" -> ", addresses.front());
  if (!std::ranges::all_of(addresses, is_loopback)) return line;
  line.state = Diagnosis::note;
  line.value += " (loopback)";
  line.advice =
      "rank 0 of this name then listens on all addresses; other hosts need an address "
      "that leads here, in MASTER_ADDR or WAYBILL_RENDEZVOUS, and gloo and NCCL the "
      "interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)";
  return line;
}

CheckLine descriptor_line(std::optional<std::int64_t> limit, std::optional<std::int64_t> most) {
  CheckLine line{"open files", Diagnosis::good,
                 concat("at most ", text_of(limit), " (ulimit -n)",
                        limit == most ? "" : concat(", can be raised to ", text_of(most)))};
  if (!limit || *limit > least_descriptors) return line;
  line.state = Diagnosis::note;
  line.advice = concat(
      "rank 0 of a rendezvous over TCP needs one a rank, processes that share "
      "memory one a rank each: for more than about ",
      *limit - *limit / 8, " ranks, ulimit -n ", most ? text_of(most) : "65536");
  return line;
}

CheckLine memlock_line(std::optional<std::int64_t> limit_bytes) {
  CheckLine line{
      "locked memory", Diagnosis::good,
      limit_bytes ? concat("at most ", format_bytes(*limit_bytes), " (ulimit -l)") : "unlimited"};
  constexpr std::int64_t enough = std::int64_t{1} << 30;
  if (!limit_bytes || *limit_bytes >= enough) return line;
  line.state = Diagnosis::note;
  line.advice =
      "RDMA (NVSHMEM, NCCL over InfiniBand) locks memory: ulimit -l unlimited, in "
      "containers --ulimit memlock=-1";
  return line;
}

std::vector<CheckLine> check_host() {
  const auto cores = static_cast<std::int64_t>(std::thread::hardware_concurrency());
  std::vector<CheckLine> lines;
  lines.push_back({"cores", Diagnosis::good, std::to_string(cores)});
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

std::vector<CheckLine> check_python(const PythonFacts& facts) {
  if (facts.python.empty()) return {};
  std::vector<CheckLine> lines{{"Python", Diagnosis::good, printable_line(facts.python)}};
  if (facts.torch.empty()) {
    lines.push_back({"torch", Diagnosis::note, "not installed",
                     "waybill.torch needs it; for GPUs a build for CUDA 13: pip install torch"});
  } else {
    lines.push_back({"torch", Diagnosis::good, printable_line(facts.torch)});
  }
  return lines;
}

}  // namespace waybill::cli
