#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/routing/metadata.h"
#include "waybill/runtime/world.h"

namespace waybill {

/// A CUDA call failed. The text names the verb, the error and the device.
class CudaError : public Error {
 public:
  using Error::Error;
};

/// Counts the GPUs that this process sees: 0 without a driver.
[[nodiscard]] int num_gpus();

/// A kernel of a rank of this process has reported it: a wait that missed its deadline, or a wrong
/// input. The device is lost then, and later errors of CUDA say no more.
struct DeviceFault {
  std::int32_t rank = 0;
  int device = 0;
  std::int32_t num_ranks = 0;  ///< this process has so many ranks on the device
  std::string text;            ///< call, rank, peer, wanted and seen value; or the input
};

/// Returns the reports of the ranks whose worlds exist. On any thread, also when a device is lost.
[[nodiscard]] std::vector<DeviceFault> device_faults();

/// Makes a rank of the world whose ranks are threads of this process. Memory lies on the GPUs if
/// they reach each other's, else in pinned memory of the host (WAYBILL_PEER_ACCESS refuses or
/// forces that). Collective. Views point to memory that the device has or maps, streams are
/// cudaStream_t, and calls return when their work is queued.
/// @param device the GPU of this rank; several ranks may have the same one
/// @param ranks_per_node 0: all ranks on one node
/// @throws InvalidArgument for a device that is not there; Unsupported for more than 32768 ranks,
///   for a device that this build has no code for, and for GPUs without access to each other's
///   memory if that is refused; CudaError
[[nodiscard]] World make_gpu_thread_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                                          std::int32_t ranks_per_node = 0);

/// Carries rows from the ranks of one node to those of another.
enum class NetworkBackend : std::uint8_t {
  automatic,  ///< peer where all ranks are on one host, else nccl
  peer,       ///< through mapped memory: the nodes are parts of one host
  nccl,       ///< through NCCL 2.28 or later, over any network that it knows
};

/// Makes a rank of the world whose ranks are processes with a GPU each (or several on one, which
/// then take turns). The ranks of a node map each other's GPU memory (CUDA IPC). Collective. Memory
/// that close() has not given back stays until the process ends, as others may use it.
/// @param device the GPU of this rank among those that its process sees
/// @param ranks_per_node 0: all ranks on one node. A node is a host or a part of one
/// @param backend between nodes; all ranks say the same
/// @throws InvalidArgument for a device that is not there; Unsupported for ranks of one node on
///   several hosts or in one process, for GPUs of one node without access to each other's memory
///   where there are several hosts or it is refused, otherwise as above, and where NCCL is needed
///   and not found; TransportError in NCCL's words, naming the rank, when
///   it does not start; CudaError
[[nodiscard]] World make_gpu_process_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                                           std::int32_t ranks_per_node = 0,
                                           NetworkBackend backend = NetworkBackend::automatic);

/// Makes a rank of the world whose ranks are processes with a GPU each, in the symmetric memory of
/// NVSHMEM. Collective. Ranks of a node reach each other by load and store, others by put and
/// signal. Ranks may share a GPU, a slice of time each: good for tests. NVSHMEM starts with the
/// first such world of a process and stays until the process ends, as does memory that is not given
/// back by close(). On one host NVSHMEM_REMOTE_TRANSPORT=none and
/// NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo are set for it, unless they are set.
/// @param device as above
/// @param ranks_per_node 0: all ranks on one node
/// @throws Unsupported when libwaybill_nvshmem.so (-DWAYBILL_NVSHMEM=ON) or NVSHMEM is not found,
///   for ranks in one process, and for ranks of one node without pointers to each other;
///   TransportError when NVSHMEM does not start or has no memory left; CudaError
[[nodiscard]] World make_nvshmem_world(std::shared_ptr<Bootstrap> bootstrap, int device,
                                       std::int32_t ranks_per_node = 0);

/// Runs body(world) on one thread per rank and waits for all; rank r on GPU r modulo their number,
/// which is also the current device of its thread.
/// @throws as run_thread_world; Unsupported without a GPU
void run_gpu_thread_world(std::int32_t world_size, const std::function<void(World&)>& body,
                          const ThreadWorldOptions& options = {});

/// A Metadata whose tables lie on a GPU, for kernels of the caller's: contiguous views of device
/// memory, with the shapes and dtypes of the fields that they have their names from. Copies share
/// the memory.
struct DeviceMetadata {
  TensorView dst_rank;
  TensorView dst_offset;
  TensorView seq_len;
  TensorView num_recv_tokens;
  std::optional<TensorView> seq_recv_mask;
  std::optional<TensorView> recv_seq_lens;
  std::optional<TensorView> num_seqs;
  std::optional<std::int64_t> world_size;
  bool normalized = false;
  std::vector<std::int64_t> num_total_recv_tokens;  ///< on the host, as in Python
  std::shared_ptr<void> memory;                     ///< holds all views; freed with its last copy
};

/// Copies the tables to a GPU: what Python's `metadata.cuda()` does. A kernel reads the slice of
/// its rank: `to_device(metadata.get_slice(rank).normalize_dtype(), device)`.
/// @param stream on which the copies are queued; the metadata may go when this returns
/// @throws InvalidArgument for a device that is not there; CudaError
[[nodiscard]] DeviceMetadata to_device(const Metadata& metadata, int device, Stream stream = {});

/// The way back: waits for the stream, and returns the same metadata. @throws CudaError
[[nodiscard]] Metadata to_host(const DeviceMetadata& metadata, Stream stream = {});

}  // namespace waybill
