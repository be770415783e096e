#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <utility>

#include "core/checks.h"
#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/rendezvous.h"
#include "transport/bootstrap/wire.h"

namespace waybill {
namespace {

constexpr auto in_read = "read_launch_environment";

/// Names the variables of one launcher.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* ranks_per_node;
};

constexpr std::array launchers{
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    Launcher{"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
    Launcher{"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
};

std::optional<std::int32_t> number(const GetVariable& get, const std::string& name) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  require(error == std::errc{} && end == text->data() + text->size() && value >= 0, in_read, ": ",
          name, " = \"", *text, "\", expected a number >= 0");
  return value;
}

void read_ranks(const GetVariable& get, const Launcher& launcher, LaunchEnvironment& result) {
  result.launcher = launcher.name;
  result.rank = *number(get, launcher.rank);
  result.world_size = *number(get, launcher.world_size);
  detail::check_range(in_read, launcher.world_size, result.world_size, 1, max_world_size);
  detail::check_range(in_read, launcher.rank, result.rank, 0, result.world_size - 1);
  const auto local_rank = number(get, launcher.local_rank);
  const auto per_node = number(get, launcher.ranks_per_node);
  // Ranks whose numbers in the world and in the node differ lie on a later node.
  const bool several_nodes = local_rank && *local_rank != result.rank;
  result.ranks_per_node = per_node.value_or(several_nodes ? 1 : result.world_size);
  result.local_rank = local_rank.value_or(result.rank % std::max(1, result.ranks_per_node));
  require(result.ranks_per_node >= 1 && result.world_size % result.ranks_per_node == 0, in_read,
          ": ", launcher.ranks_per_node, " = ", result.ranks_per_node, ", expected a divisor of ",
          launcher.world_size, " = ", result.world_size);
  require(result.local_rank < std::max(result.ranks_per_node, 1) || !per_node, in_read, ": ",
          launcher.local_rank, " = ", result.local_rank, ", expected below ",
          launcher.ranks_per_node, " = ", result.ranks_per_node);
}

/// Launchers make ids of any length. An id that is too long for a rendezvous keeps its beginning
/// and gets a hash of the whole (FNV-1a).
std::string bounded(std::string id) {
  if (id.size() <= detail::max_job_id_bytes) return id;
  std::uint64_t hash = 0xcbf2'9ce4'8422'2325;
  for (const char character : id) {
    hash = (hash ^ static_cast<unsigned char>(character)) * 0x100'0000'01b3;
  }
  id.resize(detail::max_job_id_bytes - 24);
  return concat(id, "...", hash);
}

std::string read_job_id(const GetVariable& get) {
  if (const auto id = get("WAYBILL_JOB_ID"); id && !id->empty()) {
    require(id->size() <= detail::max_job_id_bytes, in_read, ": WAYBILL_JOB_ID has ", id->size(),
            " bytes, expected at most ", detail::max_job_id_bytes);
    return *id;
  }
  if (const auto id = get("TORCHELASTIC_RUN_ID"); id && !id->empty() && *id != "none") {
    const auto restarts = get("TORCHELASTIC_RESTART_COUNT").value_or("0");
    return bounded(concat("torchelastic ", *id, ", restart ", restarts));
  }
  if (const auto id = get("SLURM_JOB_ID"); id && !id->empty()) {
    const auto step = get("SLURM_STEP_ID");
    return bounded(concat("slurm ", *id, step ? "." : "", step.value_or("")));
  }
  return {};
}

std::string read_rendezvous(const GetVariable& get) {
  if (auto named = get("WAYBILL_RENDEZVOUS")) return *std::move(named);
  const auto host = get("MASTER_ADDR");
  if (!host) return {};
  const std::int32_t port = number(get, "MASTER_PORT").value_or(29500);
  require(port < 65535, in_read, ": MASTER_PORT = ", port, ", expected 0..65534");
  const bool in_brackets = host->find(':') != std::string::npos && !host->starts_with('[');
  return concat("tcp://", in_brackets ? "[" : "", *host, in_brackets ? "]:" : ":", port + 1);
}

constexpr std::string_view tcp_scheme = "tcp://";
constexpr std::string_view file_scheme = "file://";

[[noreturn]] void throw_invalid_rendezvous(const std::string& place) {
  throw_invalid("make_environment_bootstrap: rendezvous = \"", place,
                "\", expected tcp://HOST:PORT, tcp://[ADDRESS]:PORT or file:///FOLDER (set "
                "WAYBILL_RENDEZVOUS, or MASTER_ADDR and MASTER_PORT)");
}

/// Reads "HOST:PORT"; an IPv6 address, which has colons itself, needs brackets: "[::1]:PORT".
detail::TcpJob read_tcp_job(const LaunchEnvironment& environment) {
  const std::string place = environment.rendezvous.substr(tcp_scheme.size());
  const auto colon = place.rfind(':');
  std::uint16_t port = 0;
  bool ok = colon != std::string::npos && colon > 0;
  if (ok) {
    const char* end = place.data() + place.size();
    const auto parsed = std::from_chars(place.data() + colon + 1, end, port);
    ok = parsed.ec == std::errc{} && parsed.ptr == end && port > 0;
  }
  std::string host = place.substr(0, ok ? colon : 0);
  const bool in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (in_brackets) host = host.substr(1, host.size() - 2);
  ok = ok && (in_brackets || host.find_first_of(":[]") == std::string::npos) &&
       host.find_first_of("[]") == std::string::npos;
  if (!ok) throw_invalid_rendezvous(environment.rendezvous);
  return {environment.rank, environment.world_size, host, port, environment.job};
}

}  // namespace

LaunchEnvironment read_launch_environment(const GetVariable& get) {
  LaunchEnvironment result;
  result.launcher = "none";
  for (const Launcher& launcher : launchers) {
    if (get(launcher.rank) && get(launcher.world_size)) {
      read_ranks(get, launcher, result);
      break;
    }
  }
  result.rendezvous = read_rendezvous(get);
  result.job = {.id = read_job_id(get), .secret = get("WAYBILL_RENDEZVOUS_SECRET").value_or("")};
  return result;
}

LaunchEnvironment read_launch_environment() {
  return read_launch_environment([](const std::string& name) -> std::optional<std::string> {
    const char* text = std::getenv(name.c_str());  // NOLINT(concurrency-mt-unsafe): only read
    if (text == nullptr) return std::nullopt;
    return text;
  });
}

std::unique_ptr<Bootstrap> make_environment_bootstrap(const LaunchEnvironment& environment,
                                                      double timeout_s) {
  const std::string& place = environment.rendezvous;
  if (environment.world_size == 1) {
    return std::move(make_thread_bootstraps(1, timeout_s).front());
  }
  if (place.starts_with(tcp_scheme)) {
    const auto [rank, world_size, host, port, job] = read_tcp_job(environment);
    return make_tcp_bootstrap(rank, world_size, host, port, timeout_s, job);
  }
  // file://FOLDER would depend on where a rank was started.
  if (place.starts_with(file_scheme) && place.substr(file_scheme.size()).starts_with('/')) {
    return make_file_bootstrap(environment.rank, environment.world_size,
                               place.substr(file_scheme.size()), timeout_s, environment.job);
  }
  throw_invalid_rendezvous(place);
}

void report_failed_start(const LaunchEnvironment& environment, std::string_view reason,
                         double patience_s) noexcept {
  if (environment.world_size <= 1) return;
  try {
    if (environment.rendezvous.starts_with(tcp_scheme)) {
      detail::report_failure(read_tcp_job(environment), reason, patience_s);
    } else if (environment.rendezvous.starts_with(file_scheme)) {
      make_environment_bootstrap(environment, patience_s)->fail(reason);
    }
  } catch (const std::exception&) {
    // The others find out by their deadlines.
  }
}

}  // namespace waybill
