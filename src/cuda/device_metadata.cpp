#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/memory_layout.h"
#include "rank/gpu_rank.h"
#include "waybill/core/error.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill {
namespace {

std::int64_t bytes_of(const IndexArray& table) { return table.size() * dtype_bytes(table.dtype()); }

/// Calls `use` with each table of the metadata that is there, and its place in the other form.
template <class From, class To, class Use>
void for_tables(const From& from, To& to, Use&& use) {
  use(from.dst_rank, to.dst_rank);
  use(from.dst_offset, to.dst_offset);
  use(from.seq_len, to.seq_len);
  use(from.num_recv_tokens, to.num_recv_tokens);
  if (from.seq_recv_mask) use(*from.seq_recv_mask, to.seq_recv_mask.emplace());
  if (from.recv_seq_lens) use(*from.recv_seq_lens, to.recv_seq_lens.emplace());
  if (from.num_seqs) use(*from.num_seqs, to.num_seqs.emplace());
  to.world_size = from.world_size;
  to.normalized = from.normalized;
  to.num_total_recv_tokens = from.num_total_recv_tokens;
}

}  // namespace

DeviceMetadata to_device(const Metadata& metadata, int device, Stream stream) {
  require(0 <= device && device < num_gpus(), "to_device: device = ", device, ", expected 0..",
          num_gpus() - 1);
  const cuda::OnDevice on(device);
  auto* const queue = static_cast<cudaStream_t>(stream.handle);
  DeviceMetadata made;
  detail::MemoryLayout parts;
  for_tables(metadata, made,
             [&](const IndexArray& table, TensorView&) { (void)parts.take(bytes_of(table)); });
  made.memory = cuda::device_memory(parts.total(), queue);
  auto* const first = static_cast<std::byte*>(made.memory.get());
  parts = detail::MemoryLayout();
  for_tables(metadata, made, [&](const IndexArray& table, TensorView& view) {
    view = TensorView(first + parts.take(bytes_of(table)), table.dtype(), table.shape());
    const auto size = static_cast<std::size_t>(bytes_of(table));
    cuda::cuda_check(cudaMemcpyAsync(view.data, table.data(), size, cudaMemcpyHostToDevice, queue),
                     "copying metadata to the device");
  });
  return made;
}

Metadata to_host(const DeviceMetadata& metadata, Stream stream) {
  auto* const queue = static_cast<cudaStream_t>(stream.handle);
  Metadata made;
  for_tables(metadata, made, [&](const TensorView& view, IndexArray& table) {
    table = IndexArray(view.shape, view.dtype);
    const auto size = static_cast<std::size_t>(bytes_of(table));
    cuda::cuda_check(cudaMemcpyAsync(table.data(), view.data, size, cudaMemcpyDeviceToHost, queue),
                     "copying metadata from the device");
  });
  cuda::cuda_check(cudaStreamSynchronize(queue), "waiting for metadata of the device");
  return made;
}

}  // namespace waybill
