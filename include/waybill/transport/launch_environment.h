#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace waybill {

/// What keeps the ranks of one job apart from others that come to the same place.
struct JobIdentity {
  /// The same on all ranks of a job, another one in every other job. Empty: none, and then nobody
  /// can promise that two jobs do not mix.
  std::string id;
  /// Known to the ranks of the job alone. Over TCP both sides prove that they have it. Empty: none.
  std::string secret;
};

/// What a launcher tells its processes.
struct LaunchEnvironment {
  std::string launcher;  ///< "torchrun", "openmpi", "slurm", "pmi" or "none"
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int32_t local_rank = 0;
  std::int32_t ranks_per_node = 1;
  /// Where ranks meet: "tcp://HOST:PORT" or "file:///FOLDER". Empty: not said.
  std::string rendezvous;
  JobIdentity job;
};

/// Looks up one variable; nullopt when it is not set.
using GetVariable = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), Open MPI
/// (OMPI_COMM_WORLD_*), Slurm (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NTASKS_PER_NODE)
/// and PMI (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS), the first that is there in this
/// order; without any of them it is one rank, alone. WAYBILL_RENDEZVOUS names where ranks meet;
/// else it is MASTER_ADDR and the port after MASTER_PORT, as torchrun itself listens on
/// MASTER_PORT. The job's id is WAYBILL_JOB_ID, else TORCHELASTIC_RUN_ID (unless "none") with
/// TORCHELASTIC_RESTART_COUNT, else SLURM_JOB_ID with SLURM_STEP_ID, else none; its secret is
/// WAYBILL_RENDEZVOUS_SECRET. Unknown sizes of a node become 1 where ranks lie on several nodes,
/// world_size else.
/// @throws InvalidArgument naming the variable, for numbers that are none or do not fit each other.
[[nodiscard]] LaunchEnvironment read_launch_environment(const GetVariable& get);

/// The same with the variables of this process.
[[nodiscard]] LaunchEnvironment read_launch_environment();

}  // namespace waybill
