#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/topology.h"
#include "waybill/core/wait.h"

namespace waybill {

/// Seconds that a wait may last unless the caller says otherwise.
inline constexpr double default_timeout_s = 60.0;

/// Tells ranks their numbers and lets them exchange a few KB. It sets things up; data goes
/// another way.
///
/// All ranks make collective calls in the same order. An object serves one thread at a time.
class Bootstrap {
 public:
  using Bytes = std::vector<std::byte>;

  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;
  virtual ~Bootstrap() = default;

  [[nodiscard]] Rank rank() const noexcept { return rank_; }
  [[nodiscard]] std::int32_t world_size() const noexcept { return world_size_; }
  [[nodiscard]] double timeout_s() const noexcept { return timeout_s_; }

  /// Collective: every rank gives some bytes (also none, also of different length) and gets those
  /// of all ranks, by rank. `operation` names the reason in errors, and ranks compare it.
  /// @throws Disagreement on all ranks when they do not name the same operation; the object stays
  ///   usable. Timeout naming a rank that did not call within timeout_s; PeerFailed naming one that
  ///   gave up; TransportError when the connection broke; Interrupted, of which the others
  ///   learn. Afterwards the object is unusable, and says so.
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> mine,
                                              std::string_view operation);

  /// Collective: returns when all ranks have called. @throws as all_gather
  void barrier(std::string_view operation);

  /// This rank gives up and says why: waits of the other ranks for it end with PeerFailed, if the
  /// engine can reach them. The first call counts. Between processes, an exchange to which this
  /// rank has given its bytes still ends well on the others. Not collective, never waits. The
  /// object is unusable afterwards.
  virtual void fail(std::string_view reason) noexcept;

  /// Waits elsewhere call it. @throws PeerFailed (or what ended the run) when a rank is known to
  ///   have given up; an engine that learns of it only in exchanges throws nothing
  virtual void check_peers(std::string_view operation) const;

  /// The scope that ends the waits of all ranks together, if they are threads of one run. Else
  /// null.
  [[nodiscard]] virtual std::shared_ptr<FailureScope> failure_scope() const;

 protected:
  /// @throws InvalidArgument unless 0 <= rank < world_size, and as check_timeout
  Bootstrap(std::int32_t rank, std::int32_t world_size, double timeout_s);

 private:
  virtual std::vector<Bytes> exchange(std::span<const std::byte> mine,
                                      std::string_view operation) = 0;

  Rank rank_;
  std::int32_t world_size_;
  double timeout_s_;
  std::uint64_t num_exchanges_ = 0;
  std::string end_;  ///< why the object is unusable
};

/// Gathers one plain value per rank. @throws TransportError when a rank sent another size
template <class Value>
[[nodiscard]] std::vector<Value> all_gather_value(Bootstrap& bootstrap, const Value& mine,
                                                  std::string_view operation) {
  static_assert(std::is_trivially_copyable_v<Value>);
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), operation);
  std::vector<Value> values(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != sizeof(Value)) {
      throw TransportError(concat(operation, ": rank ", r, " sent ", all[r].size(),
                                  " bytes, expected ", sizeof(Value)));
    }
    std::memcpy(&values[r], all[r].data(), sizeof(Value));
  }
  return values;
}

/// Collective: every rank says what failed on it. An empty text says that nothing did.
/// @throws PeerFailed on all ranks when there is trouble, naming the first rank that has some;
///   Timeout
void agree(Bootstrap& bootstrap, std::string_view trouble, std::string_view operation);

/// Collective: does this rank's part of something that succeeds on all ranks or fails on all.
/// Throws the exception of `work` on the ranks where it threw; on the others as agree. An
///   interrupted rank tells the others and does not wait for them.
template <class Work>
void run_collectively(Bootstrap& bootstrap, std::string_view operation, Work&& work) {
  std::exception_ptr error;
  std::string trouble;
  try {
    work();
  } catch (const Interrupted& interrupted) {  // the program stops: it waits for nobody
    bootstrap.fail(interrupted.what());
    throw;
  } catch (const std::exception& caught) {
    error = std::current_exception();
    trouble = caught.what();
    if (trouble.empty()) trouble = "an error without a text";
  }
  try {
    agree(bootstrap, trouble, operation);
  } catch (const Error&) {
    if (!error) throw;
  }
  if (error) std::rethrow_exception(error);
}

/// Not collective: makes something that needs the other ranks. If that throws, the others learn of
/// it and do not wait for this rank. Throws the exception of `make`.
template <class Make>
[[nodiscard]] auto fail_on_error(Bootstrap& bootstrap, Make&& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    bootstrap.fail(error.what());
    throw;
  }
}

/// A text that all processes under one operating system share until it restarts; other hosts have
/// another one.
[[nodiscard]] std::string host_id();

/// Collective: says whether all ranks run under one operating system.
[[nodiscard]] bool on_one_host(Bootstrap& bootstrap);

/// Collective. @throws Unsupported on all ranks unless they run under one operating system, naming
///   a rank that is elsewhere; Timeout
void require_one_host(Bootstrap& bootstrap, std::string_view who);

/// Keeps the ranks of one job apart from others that use the same address.
struct JobIdentity {
  /// All ranks of a job have the same id, every other job another one. Without an id two jobs may
  /// mix.
  std::string id;
  /// Only the ranks of the job know it. Over TCP both sides prove that they do. Empty: none.
  std::string secret;
};

/// The variables that a launcher sets for its processes.
struct LaunchEnvironment {
  std::string launcher;  ///< "torchrun", "openmpi", "slurm", "pmi" or "none"
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int32_t local_rank = 0;
  std::int32_t ranks_per_node = 1;
  /// The place of the rendezvous: "tcp://HOST:PORT" or "file:///FOLDER". Empty: none is set.
  std::string rendezvous;
  JobIdentity job;
};

/// Looks up one variable; nullopt when it is not set.
using GetVariable = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), Open MPI
/// (OMPI_COMM_WORLD_*), Slurm (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NTASKS_PER_NODE)
/// and PMI (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS), the first that is there in this
/// order; without any of them it is one rank, alone. WAYBILL_RENDEZVOUS names the
/// rendezvous; else it is MASTER_ADDR and the port after MASTER_PORT, as torchrun itself listens
/// on MASTER_PORT. The job's id is WAYBILL_JOB_ID, else TORCHELASTIC_RUN_ID (unless "none") with
/// TORCHELASTIC_RESTART_COUNT, else SLURM_JOB_ID with SLURM_STEP_ID, else none; its secret is
/// WAYBILL_RENDEZVOUS_SECRET. An unknown size of a node becomes 1 if the ranks lie on several
/// nodes, else world_size.
/// @throws InvalidArgument naming the variable, for values that are not numbers or do not fit
///   together.
[[nodiscard]] LaunchEnvironment read_launch_environment(const GetVariable& get);

/// Reads the variables of this process.
[[nodiscard]] LaunchEnvironment read_launch_environment();

/// Makes one object per rank for ranks that are threads of this process; each thread gets its own.
/// They share a failure_scope(), which fail() ends.
/// @throws InvalidArgument unless world_size >= 1, and as check_timeout
[[nodiscard]] std::vector<std::unique_ptr<Bootstrap>> make_thread_bootstraps(
    std::int32_t world_size, double timeout_s = default_timeout_s);

/// Connects ranks through rank 0, which listens on `port` of `host` (a name or an address; IPv4 and
/// IPv6), or on all addresses of its machine if its own name is a loopback address there. The
/// others connect until the deadline, and rank 0 accepts them. It rejects clients of another job,
/// world or release, and those without the job's secret: they get the reason, stderr gets a line,
/// and nothing changes for the others. Collective. Traffic is not encrypted: use trusted networks
/// only (SECURITY.md).
/// @throws Timeout naming a rank that did not come; PeerFailed naming one that failed;
///   TransportError with the reason when rank 0 rejects this rank; InvalidArgument
[[nodiscard]] std::unique_ptr<Bootstrap> make_tcp_bootstrap(
    std::int32_t rank, std::int32_t world_size, const std::string& host, std::uint16_t port,
    double timeout_s = default_timeout_s, const JobIdentity& job = {});

/// Connects ranks through files in a folder that all ranks see. They make it if it is missing (not
/// its parent); it must belong to this user alone (mode 0700) and hold no files of another run. The
/// last rank to leave removes the files, and the folder if the ranks have made it.
/// @throws TransportError with the reason of the system when the folder is not like that or cannot
///   be used, and when it is another job's; InvalidArgument
[[nodiscard]] std::unique_ptr<Bootstrap> make_file_bootstrap(std::int32_t rank,
                                                             std::int32_t world_size,
                                                             const std::string& folder,
                                                             double timeout_s = default_timeout_s,
                                                             const JobIdentity& job = {});

/// Connects ranks as the environment says: over TCP or files. @throws as these, and as
/// read_launch_environment; InvalidArgument when it names no rendezvous and world_size > 1.
[[nodiscard]] std::unique_ptr<Bootstrap> make_environment_bootstrap(
    const LaunchEnvironment& environment, double timeout_s = default_timeout_s);

/// Tells the other ranks at the rendezvous that this one cannot start, and why, so that they name
/// it and do not wait for it. It needs no bootstrap, takes at most patience_s, and does nothing if
/// it cannot reach them.
void report_failed_start(const LaunchEnvironment& environment, std::string_view reason,
                         double patience_s = 5) noexcept;

/// An all-gather that the caller already has (MPI, torch.distributed). It keeps its own deadline.
using AllGather = std::function<std::vector<Bootstrap::Bytes>(const Bootstrap::Bytes& mine)>;
/// Tells the other ranks that this one gives up: their all-gather must throw.
using TellFailure = std::function<void(std::string_view reason)>;
/// @param tell_failure empty: the others learn nothing
/// @throws InvalidArgument for an empty all_gather. all_gather throws TransportError when it does
///   not return world_size entries.
[[nodiscard]] std::unique_ptr<Bootstrap> make_callable_bootstrap(
    std::int32_t rank, std::int32_t world_size, AllGather all_gather,
    double timeout_s = default_timeout_s, TellFailure tell_failure = {});

}  // namespace waybill
