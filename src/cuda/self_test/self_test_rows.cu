#include <cuda_runtime.h>

#include "self_test_rows.h"

namespace waybill::cuda {
namespace {

constexpr unsigned blocks = 1024;
constexpr unsigned threads = 256;

__device__ std::uint32_t number_of(const TrialRows& rows, std::int64_t rank, std::int64_t row,
                                   std::int64_t element) {
  // Finalizer of MurmurHash3 on a word that names the element.
  std::uint64_t x = (static_cast<std::uint64_t>(rank * 8 + rows.tensor) << 48) ^
                    static_cast<std::uint64_t>(row * rows.row_elements + element);
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return rows.first + static_cast<std::uint32_t>((x ^ (x >> 33)) % rows.span);
}

__global__ void fill(TrialRows to, std::int32_t rank) {
  const std::int64_t total = to.rows * to.row_elements;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total; i += step) {
    const std::uint64_t code =
        to.codes[number_of(to, rank, i / to.row_elements, i % to.row_elements)];
    for (int b = 0; b < to.element_bytes; ++b) {
      to.data[i * to.element_bytes + b] = static_cast<unsigned char>(code >> (8 * b));
    }
  }
}

__global__ void check(TrialRows rows, TrialSources sources, unsigned long long* wrong) {
  const std::int64_t total = rows.rows * rows.row_elements;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  unsigned long long differ = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total; i += step) {
    const std::int64_t row = i / rows.row_elements;
    const std::int64_t place = sources.place[row];
    if (place < 0) continue;
    const std::int64_t from = place & ((std::int64_t{1} << self_test_rank_shift) - 1);
    std::uint32_t number =
        number_of(rows, place >> self_test_rank_shift, from, i % rows.row_elements);
    if (sources.copies != nullptr) number *= static_cast<std::uint32_t>(sources.copies[row]);
    const std::uint64_t code = rows.codes[number];
    bool same = true;
    for (int b = 0; b < rows.element_bytes; ++b) {
      same &= rows.data[i * rows.element_bytes + b] == static_cast<unsigned char>(code >> (8 * b));
    }
    differ += same ? 0 : 1;
  }
  if (differ > 0) atomicAdd(wrong, differ);
}

}  // namespace

cudaError_t launch_fill_self_test(const TrialRows& to, std::int32_t rank, cudaStream_t stream) {
  if (to.rows > 0) fill<<<blocks, threads, 0, stream>>>(to, rank);
  return cudaGetLastError();
}

cudaError_t launch_check_self_test(const TrialRows& rows, const TrialSources& sources,
                                   unsigned long long* wrong, cudaStream_t stream) {
  if (rows.rows > 0) check<<<blocks, threads, 0, stream>>>(rows, sources, wrong);
  return cudaGetLastError();
}

}  // namespace waybill::cuda
