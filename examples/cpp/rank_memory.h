#pragma once

#include <cstring>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/runtime/world.h"

#ifdef WAYBILL_EXAMPLE_CUDA
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#endif

/// Where the rows of a rank lie: in host memory, or on its GPU. On a GPU it brings the stream on
/// which the rank works: ranks that share a GPU must not share a stream.
class RankMemory {
 public:
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

#ifdef WAYBILL_EXAMPLE_CUDA
  explicit RankMemory(bool on_gpu) : on_gpu_(on_gpu) {
    if (on_gpu) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~RankMemory() {
    for (void* block : blocks_) (void)cudaFree(block);
    if (on_gpu_) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] waybill::Stream stream() const { return {stream_}; }

  /// The rows where the rank works; in host memory those of `tensor` itself.
  [[nodiscard]] waybill::ConstTensorView place(const waybill::HostTensor& tensor) {
    waybill::ConstTensorView view = tensor.view();
    if (!on_gpu_) return view;
    const auto bytes = static_cast<std::size_t>(tensor.size_bytes());
    void* block = nullptr;
    check(cudaMalloc(&block, bytes + 1));
    blocks_.push_back(block);
    check(cudaMemcpyAsync(block, view.data, bytes, cudaMemcpyHostToDevice, stream_));
    check(cudaStreamSynchronize(stream_));
    view.data = static_cast<const std::byte*>(block);
    return view;
  }

  /// Copies rows to the host; the calls that wrote them are done.
  [[nodiscard]] waybill::HostTensor fetch(const waybill::TensorView& view) const {
    waybill::HostTensor tensor(view.dtype, view.shape);
    const auto bytes = static_cast<std::size_t>(tensor.size_bytes());
    if (!on_gpu_) {
      std::memcpy(tensor.bytes().data(), view.data, bytes);
    } else {
      check(cudaMemcpyAsync(tensor.bytes().data(), view.data, bytes, cudaMemcpyDeviceToHost,
                            stream_));
      check(cudaStreamSynchronize(stream_));
    }
    return tensor;
  }

 private:
  static void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
  }

  bool on_gpu_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
#else
  explicit RankMemory(bool /*on_gpu*/) {}
  ~RankMemory() = default;
  [[nodiscard]] waybill::Stream stream() const { return {}; }
  [[nodiscard]] waybill::ConstTensorView place(const waybill::HostTensor& tensor) {
    return tensor.view();
  }
  [[nodiscard]] waybill::HostTensor fetch(const waybill::TensorView& view) const {
    waybill::HostTensor tensor(view.dtype, view.shape);
    std::memcpy(tensor.bytes().data(), view.data, static_cast<std::size_t>(tensor.size_bytes()));
    return tensor;
  }
#endif
};
