// The device's quantisers against quantize_row(): their arithmetic on the host, and the kernels.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/number.h"
#include "core/to_size.h"
#include "cuda/device_arena.h"
#include "cuda/experts/kernels.h"
#include "cuda/experts/quantize.cuh"
#include "waybill/core/random.h"
#include "waybill/core/small_floats.h"
#include "waybill/cuda/gpu_world.h"
#include "waybill/moe/payload_format.h"

namespace waybill {
namespace {

using detail::to_size;
using test::cuda_ok;

constexpr int num_kinds = 8;

float of_bits(std::uint64_t bits) { return cuda::as_float(static_cast<std::uint32_t>(bits)); }

/// Rows of float32 with everything that a float can be, in turn.
std::vector<float> odd_row(Random& random, std::int64_t hidden, int kind) {
  const int base = static_cast<int>(random.below(240)) - 130;
  std::vector<float> row(to_size(hidden));
  for (std::size_t i = 0; i < row.size(); ++i) {
    float& x = row[i];
    const float sign = random.below(2) == 0 ? 1.0F : -1.0F;
    const float near = std::ldexp(1 + random.uniform_float(), static_cast<int>(random.below(12)));
    switch (kind) {
      case 0:  // of about one size, at any place of the range
        x = sign * std::ldexp(near, base);
        break;
      case 1:  // any bits, also of infinity and NaN
        x = of_bits(random.bits());
        break;
      case 2:  // any number
        x = of_bits(random.bits());
        if (!std::isfinite(x)) x = sign;
        break;
      case 3:  // subnormal numbers
        x = of_bits((random.bits() & 0x80000000U) | static_cast<std::uint64_t>(random.below(1000)));
        break;
      case 4:  // zeros of both signs, some groups with a number
        x = i % 512 == 77 ? near : 0.0F * sign;
        break;
      case 5:  // ties: multiples of a half, and of a quarter
        x = static_cast<float>(random.below(49) - 24) / (i % 512 < 256 ? 2.0F : 4.0F);
        if (i % 16 == 0) x = i % 128 == 0 ? 448.0F : 6.0F;
        break;
      case 6:  // some infinities and NaN
        x = sign * near;
        if (random.below(300) == 0) x = random.below(2) == 0 ? sign * INFINITY : sign * NAN;
        break;
      default:  // the largest numbers, next to the limits of the elements
        x = of_bits(0x7F7FFFFFU - static_cast<std::uint64_t>(random.below(1 << 22))) * sign;
        if (i % 512 >= 256) x = sign * std::ldexp(1.75F, 8) * (i % 2 == 0 ? 1.0F : 0.999999F);
    }
  }
  return row;
}

/// Rows as they are stored. 16-bit dtypes: first every pattern of 16 bits, once in order and once
/// in steps, so that groups have neighbours and strangers.
std::vector<std::byte> odd_rows(DType dtype, std::int64_t rows, std::int64_t hidden,
                                std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> bytes(to_size(rows * hidden * dtype_bytes(dtype)));
  const std::int64_t patterns = dtype_bytes(dtype) == 2 ? std::int64_t{1} << 16 : 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::vector<float> row = odd_row(random, hidden, static_cast<int>(r % num_kinds));
    for (std::int64_t i = 0; i < hidden; ++i) {
      const std::int64_t at = r * hidden + i;
      std::byte* const to = bytes.data() + at * dtype_bytes(dtype);
      if (dtype == DType::float32) {
        std::memcpy(to, &row[to_size(i)], 4);
        continue;
      }
      const float x = row[to_size(i)];
      auto bits = dtype == DType::bfloat16 ? float_to_bfloat16(x) : float_to_float16(x);
      if (at < 2 * patterns) {
        bits = static_cast<std::uint16_t>(at < patterns ? at : at * 4099 % patterns);
      }
      std::memcpy(to, &bits, 2);
    }
  }
  return bytes;
}

/// What the formats' kernels do with a row, on the host.
template <class Format>
void quantize_on_host(std::span<const float> row, std::span<std::uint8_t> elements,
                      std::span<std::uint8_t> scales) {
  constexpr std::size_t group = Format::group;
  const auto largest_of = [&](std::size_t first) {
    std::uint32_t largest = 0;
    for (const float x : row.subspan(first, group)) largest = std::max(largest, cuda::size_bits(x));
    return largest;
  };
  std::uint32_t of_row = 0;
  for (std::size_t g = 0; g < row.size(); g += group) {
    if (largest_of(g) < cuda::infinity_bits) of_row = std::max(of_row, largest_of(g));
  }
  const typename Format::Row shared(of_row);
  std::ranges::fill(scales, std::uint8_t{0});
  if constexpr (Format::has_row_scale) {
    std::memcpy(scales.data() + scales.size() - 4, &shared.scale, 4);
  }
  for (std::size_t i = 0; i < row.size(); i += cuda::lane_elements) {
    const Format format(largest_of(i / group * group), shared);
    float x[cuda::lane_elements];
    std::ranges::copy(row.subspan(i, cuda::lane_elements), x);
    const auto codes = format.quantize(x);
    std::memcpy(elements.data() + i / cuda::lane_elements * sizeof(codes), &codes, sizeof(codes));
    const auto scale = format.scale();
    std::memcpy(scales.data() + i / group * sizeof(scale), &scale, sizeof(scale));
  }
}

/// The bytes of rows, then those of their scales.
struct Wanted {
  std::vector<std::uint8_t> elements;
  std::vector<std::uint8_t> scales;
};

Wanted specified(const PayloadFormat& format, DType dtype, std::int64_t hidden,
                 const std::vector<std::byte>& rows) {
  const EPPayload payload(format, true);
  const std::int64_t row_bytes = hidden * dtype_bytes(dtype);
  const std::int64_t count = std::ssize(rows) / row_bytes;
  const std::size_t elements = to_size(payload.row_bytes(dtype, hidden));
  const std::size_t scales = to_size(payload.scale_bytes(hidden));
  Wanted wanted{std::vector<std::uint8_t>(to_size(count) * elements),
                std::vector<std::uint8_t>(to_size(count) * scales)};
  for (std::size_t r = 0; r < to_size(count); ++r) {
    quantize_row(format, rows.data() + r * to_size(row_bytes), dtype,
                 std::span(wanted.elements).subspan(r * elements, elements),
                 std::span(wanted.scales).subspan(r * scales, scales));
  }
  return wanted;
}

/// @return where they differ first; -1: nowhere
std::int64_t first_difference(const std::vector<std::uint8_t>& a,
                              const std::vector<std::uint8_t>& b) {
  if (a.size() != b.size()) return 0;
  const auto at = std::ranges::mismatch(a, b).in1;
  return at == a.end() ? -1 : at - a.begin();
}

template <class Format>
void check_on_host(const char* name, std::int64_t rows, std::int64_t hidden) {
  SCOPED_TRACE(name);
  const PayloadFormat& format = payload_format(name, "format");
  const EPPayload payload(format, true);
  Random random(31);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::vector<float> row = odd_row(random, hidden, static_cast<int>(r % num_kinds));
    std::vector<std::byte> bytes(row.size() * 4);
    std::memcpy(bytes.data(), row.data(), bytes.size());
    const Wanted wanted = specified(format, DType::float32, hidden, bytes);
    Wanted got{std::vector<std::uint8_t>(wanted.elements.size()),
               std::vector<std::uint8_t>(wanted.scales.size())};
    quantize_on_host<Format>(row, got.elements, got.scales);
    ASSERT_EQ(first_difference(got.scales, wanted.scales), -1) << "scales of row " << r;
    ASSERT_EQ(first_difference(got.elements, wanted.elements), -1) << "elements of row " << r;
  }
}

TEST(Quantizers, equal_the_specification_on_the_host) {
  check_on_host<cuda::Float8>("float8", 200, 512);
  check_on_host<cuda::Float8Ue8m0>("float8_ue8m0", 200, 512);
  check_on_host<cuda::Mxfp8>("mxfp8", 200, 512);
  check_on_host<cuda::Mxfp8E5m2>("mxfp8_e5m2", 200, 512);
  check_on_host<cuda::Nvfp4>("nvfp4", 200, 512);
}

/// The quotient is that of IEEE division, for all that a format may ask.
TEST(Quantizers, divide_to_nearest) {
  Random random(32);
  for (int i = 0; i < 300'000; ++i) {
    const int base = static_cast<int>(random.below(119)) - 59;
    const float divisor = std::ldexp(1 + random.uniform_float(), base);
    const int size = static_cast<int>(random.below(20)) - 10;
    float x = std::ldexp(1 + random.uniform_float(), base + size);
    if (i % 3 == 0) x = divisor * bfloat16_to_float(float_to_bfloat16(std::ldexp(1.5F, size)));
    if (i % 2 == 0) x = -x;
    const cuda::Divisor by(divisor);
    ASSERT_TRUE(by.is_plain());
    ASSERT_EQ(cuda::as_bits(by.divide(x)), cuda::as_bits(x / divisor)) << x << " / " << divisor;
  }
}

std::byte* device_bytes(std::size_t count) {
  void* memory = nullptr;
  cuda_ok(cudaMalloc(&memory, count));
  return static_cast<std::byte*>(memory);
}

/// Quantises rows on a GPU. @param shift bytes by which the input misses its alignment
void check_on_gpu(const PayloadFormat& format, DType dtype, std::int64_t rows, std::int64_t hidden,
                  std::int64_t shift) {
  SCOPED_TRACE(
      concat(format.name, " from ", dtype, ", ", rows, " rows of ", hidden, ", shift ", shift));
  const std::vector<std::byte> input = odd_rows(dtype, rows, hidden, 33);
  const Wanted wanted = specified(format, dtype, hidden, input);
  constexpr std::size_t guard = 64;
  constexpr int guard_byte = 0x5C;
  Wanted got{std::vector<std::uint8_t>(wanted.elements.size() + guard),
             std::vector<std::uint8_t>(wanted.scales.size() + guard)};
  std::byte* const in = device_bytes(input.size() + to_size(shift));
  const cuda::QuantizeParams params{.input = in + shift,
                                    .elements = device_bytes(got.elements.size()),
                                    .scales = device_bytes(got.scales.size()),
                                    .num_rows = rows,
                                    .hidden = hidden,
                                    .scale_bytes = EPPayload(format, true).scale_bytes(hidden)};
  cuda_ok(cudaMemcpy(in + shift, input.data(), input.size(), cudaMemcpyDefault));
  cuda_ok(cudaMemset(params.elements, guard_byte, got.elements.size()));
  cuda_ok(cudaMemset(params.scales, guard_byte, got.scales.size()));
  cuda_ok(cuda::prepare_quantize(format.name, dtype));
  cuda_ok(cuda::launch_quantize(params, format.name, dtype, nullptr));
  cuda_ok(cudaDeviceSynchronize());
  cuda_ok(cudaMemcpy(got.elements.data(), params.elements, got.elements.size(), cudaMemcpyDefault));
  cuda_ok(cudaMemcpy(got.scales.data(), params.scales, got.scales.size(), cudaMemcpyDefault));
  for (void* part : {in, params.elements, params.scales}) cuda_ok(cudaFree(part));
  for (auto* bytes : {&got.elements, &got.scales}) {
    EXPECT_EQ(std::ranges::count(std::span(*bytes).last(guard), guard_byte), guard);
    bytes->resize(bytes->size() - guard);
  }
  EXPECT_EQ(first_difference(got.scales, wanted.scales), -1);
  EXPECT_EQ(first_difference(got.elements, wanted.elements), -1);
}

TEST(GpuQuantize, rows_equal_the_specification) {
  if (num_gpus() < 1) FAIL() << "no GPU";
  for (const PayloadFormat& format : payload_formats()) {
    if (format.quantize == nullptr) continue;
    for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
      check_on_gpu(format, dtype, 300, 512, 0);  // with every pattern of 16 bits
      check_on_gpu(format, dtype, 9, 7168, 0);
      check_on_gpu(format, dtype, 3, 128, dtype_bytes(dtype));
      check_on_gpu(format, dtype, 2, 16384 + 128, 0);  // rows that a block does not hold
      check_on_gpu(format, dtype, 1, 32768, dtype_bytes(dtype));
    }
    check_on_gpu(format, DType::bfloat16, 0, 128, 0);
  }
  check_on_gpu(payload_format("mxfp8", "format"), DType::bfloat16, 5, 32, 0);
  check_on_gpu(payload_format("nvfp4", "format"), DType::bfloat16, 5, 16, 0);
}

}  // namespace
}  // namespace waybill
