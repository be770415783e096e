#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/to_size.h"
#include "cuda/device/params.h"
#include "cuda/device_arena.h"

namespace waybill::test {

/// Device memory of a test that launches kernels itself. Nobody else's kernel is waited for.
class DeviceBlocks {
 public:
  DeviceBlocks() { cuda_ok(cudaSetDevice(0)); }

  /// Zeros.
  template <class T>
  [[nodiscard]] T* take(std::int64_t count) {
    void* memory = nullptr;
    const auto bytes = sizeof(T) * detail::to_size(count > 0 ? count : 1);
    cuda_ok(cudaMalloc(&memory, bytes));
    blocks_.emplace_back(memory, [](void* at) { (void)cudaFree(at); });
    cuda_ok(cudaMemset(memory, 0, bytes));
    return static_cast<T*>(memory);
  }
  template <class T>
  [[nodiscard]] T* upload(const std::vector<T>& values) {
    T* const memory = take<T>(static_cast<std::int64_t>(values.size()));
    write(memory, values);
    return memory;
  }
  template <class T>
  static void write(T* to, const std::vector<T>& values) {
    cuda_ok(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  template <class T>
  [[nodiscard]] static std::vector<T> download(const T* from, std::int64_t count) {
    std::vector<T> values(count);
    cuda_ok(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  /// Zeros in host memory that the device sees.
  template <class T>
  [[nodiscard]] T* pinned(std::int64_t count) {
    void* memory = nullptr;
    const auto bytes = sizeof(T) * detail::to_size(count);
    cuda_ok(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
    blocks_.emplace_back(memory, [](void* at) { (void)cudaFreeHost(at); });
    std::fill_n(static_cast<unsigned char*>(memory), bytes, static_cast<unsigned char>(0));
    return static_cast<T*>(memory);
  }

 private:
  std::vector<std::shared_ptr<void>> blocks_;
};

/// One rank of a world of which the others are not there: what it tells them all goes to one place,
/// and what they would tell it is written before its kernels run.
class OneOfMany {
 public:
  static constexpr std::uint64_t epoch = 1;  ///< of the call that is tested

  OneOfMany(std::int32_t world_size, std::int32_t rank) : world_size_(world_size), rank_(rank) {
    record_ = blocks_.pinned<cuda::FaultRecord>(1);
    claimed_ = blocks_.take<unsigned long long>(1);
    // Arrivals, and behind them what all mean by call 1: nothing, tagged with its number.
    const std::int64_t words =
        first_fingerprint() + std::int64_t{world_size} * 2 * cuda::fault_words;
    arrivals_ = blocks_.upload(std::vector<std::uint64_t>(words, epoch));
    arrivals_of_others_ = blocks_.take<std::uint64_t>(words);
  }

  [[nodiscard]] DeviceBlocks& blocks() { return blocks_; }
  [[nodiscard]] std::int32_t world_size() const { return world_size_; }
  [[nodiscard]] std::int32_t rank() const { return rank_; }

  /// Where all ranks have a part: in the parameters and in a table.
  template <class T>
  [[nodiscard]] cuda::NearPeers<T> peers(T* own, T* of_others) {
    std::vector<T*> parts(world_size_, of_others);
    parts[rank_] = own;
    return peers_at(parts);
  }
  /// Of parts that lie one behind the other.
  [[nodiscard]] cuda::NearPeers<std::byte> peers_of_all(std::byte* first, std::int64_t each_bytes) {
    std::vector<std::byte*> parts;
    for (std::int32_t r = 0; r < world_size_; ++r) parts.push_back(first + r * each_bytes);
    return peers_at(parts);
  }
  /// In a table alone.
  [[nodiscard]] cuda::Peers<const std::byte> table_of_all(const std::byte* first,
                                                          std::int64_t each_bytes) {
    const auto all = peers_of_all(const_cast<std::byte*>(first), each_bytes);
    return {all.all.bases, all.all.offset};
  }

  [[nodiscard]] cuda::ArriveParams arrive(cuda::FaultKind kind, cuda::CallState* state) {
    cuda::ArriveParams params{};
    params.rank = rank_;
    params.world_size = world_size_;
    params.kind = kind;
    params.state = state;
    params.sink = {.record = record_,
                   .claimed = claimed_,
                   .timeout_ns = 5'000'000'000,
                   .look_after_ns = 1'000'000'000,
                   .grace_ns = 0,
                   .traps = false};
    params.node_ranks = world_size_;
    params.own_arrivals = arrivals_;
    params.arrivals = peers(arrivals_, arrivals_of_others_);
    params.fingerprint.first_slot = first_fingerprint();
    return params;
  }

  /// Waits for the kernels. @return whether none of them gave up
  [[nodiscard]] bool finish() const {
    cuda_ok(cudaDeviceSynchronize());
    return record_->kind == cuda::FaultKind::none;
  }

 private:
  /// Two words are loaded at once.
  [[nodiscard]] std::int32_t first_fingerprint() const { return (world_size_ + 1) / 2 * 2; }

  template <class T>
  [[nodiscard]] cuda::NearPeers<T> peers_at(const std::vector<T*>& parts) {
    auto* const* const table = reinterpret_cast<std::byte* const*>(blocks_.upload(parts));
    cuda::NearPeers<T> peers{{}, {table, 0}};
    for (std::size_t r = 0; r < parts.size() && r < cuda::max_near_peers; ++r) {
      peers.near[r] = parts[r];
    }
    return peers;
  }

  DeviceBlocks blocks_;
  std::int32_t world_size_;
  std::int32_t rank_;
  cuda::FaultRecord* record_;
  unsigned long long* claimed_;
  std::uint64_t* arrivals_;
  std::uint64_t* arrivals_of_others_;
};

}  // namespace waybill::test
