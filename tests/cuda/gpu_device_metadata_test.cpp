#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "waybill/cuda/gpu_world.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

bool lies_on_device(const TensorView& view, int device) {
  cudaPointerAttributes attributes{};
  return cudaPointerGetAttributes(&attributes, view.data) == cudaSuccess &&
         attributes.type == cudaMemoryTypeDevice && attributes.device == device;
}

std::vector<Metadata> metadata_of_a_plan() {
  const E2eMetadata made = create_qkv_dispatch(4, 64, 3, 4, /*seed=*/7).metadata;
  return {made.fwd_q, made.rev_q, made.fwd_kv, made.rev_kv};
}

TEST(GpuDeviceMetadata, ComesBackAsItWas) {
  for (const Metadata& metadata : metadata_of_a_plan()) {
    const DeviceMetadata there = to_device(metadata, 0);
    EXPECT_TRUE(lies_on_device(there.dst_rank, 0) && lies_on_device(there.num_recv_tokens, 0));
    EXPECT_EQ(there.dst_rank.shape, metadata.dst_rank.shape());
    EXPECT_EQ(to_host(there), metadata);
  }
}

TEST(GpuDeviceMetadata, ASliceInTheDtypesOfKernels) {
  for (const Metadata& metadata : metadata_of_a_plan()) {
    const Metadata slice = metadata.get_slice(Rank{2}).normalize_dtype();
    const DeviceMetadata there = to_device(slice, 0);
    EXPECT_EQ(there.dst_rank.dtype, DType::int32);
    EXPECT_EQ(there.seq_len.dtype, DType::uint32);
    EXPECT_TRUE(there.normalized && !there.world_size && !there.num_seqs);
    EXPECT_EQ(to_host(there), slice);
  }
}

TEST(GpuDeviceMetadata, KeepsItsMemoryWithACopy) {
  const Metadata metadata = metadata_of_a_plan().front();
  DeviceMetadata there = to_device(metadata, 0);
  const DeviceMetadata kept = there;
  there = {};
  EXPECT_EQ(to_host(kept), metadata);
}

TEST(GpuDeviceMetadata, TablesWithoutElements) {
  const Metadata metadata = compute_metadata(IndexArray(Shape{2, 0}), IndexArray(Shape{2, 0})).fwd;
  EXPECT_EQ(to_host(to_device(metadata, 0)), metadata);
}

TEST(GpuDeviceMetadata, RunsOnTheCallersStream) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const Metadata metadata = metadata_of_a_plan().back();
  EXPECT_EQ(to_host(to_device(metadata, 0, {stream}), {stream}), metadata);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(GpuDeviceMetadata, ADeviceThatIsNotThere) {
  const Metadata metadata = metadata_of_a_plan().front();
  for (const int device : {-1, num_gpus()}) {
    EXPECT_THROW((void)to_device(metadata, device), InvalidArgument) << device;
  }
}

}  // namespace
}  // namespace waybill
