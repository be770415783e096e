#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/routing/metadata.h"
#include "waybill/runtime/world.h"

namespace waybill {

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
