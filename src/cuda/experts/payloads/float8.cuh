#pragma once

#include <string_view>

#include "../../device/rounding.cuh"

namespace waybill::cuda {

// A format is a class whose object is what the lanes of one group share. src/moe/payloads specifies
// what it does.

/// In formats without a scale of the row its groups share nothing.
struct NoRow {
  __host__ __device__ explicit NoRow(std::uint32_t /*largest*/) {}
};

/// float8 of src/moe/payloads/float8.cpp.
class Float8 {
 public:
  static constexpr std::string_view name = "float8";
  static constexpr int group = 128;
  static constexpr bool has_row_scale = false;
  using Row = NoRow;
  using Scale = float;
  using Elements = std::uint64_t;  ///< lane_elements of them

  /// @param largest size_bits() of the group's largest element
  __host__ __device__ Float8(std::uint32_t largest, const Row& /*row*/)
      : scale_(largest > infinity_bits ? as_float(quiet_nan_bits)
                                       : product(as_float(largest), 1.0F / 448.0F)),
        divisor_(scale_) {}

  [[nodiscard]] __host__ __device__ Scale scale() const { return scale_; }

  [[nodiscard]] __host__ __device__ Elements quantize(float (&x)[lane_elements]) const {
    if (scale_ == 0) return 0;
    divisor_.divide(x);
    return float8_codes<__NV_E4M3>(x);
  }

 private:
  float scale_;
  Divisor divisor_;
};

}  // namespace waybill::cuda
