#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "waybill/core/dtype.h"

namespace waybill {

/// The elements and scales of a row, as they travel. One entry of the table in
/// src/moe/payload_format.cpp.
struct PayloadFormat {
  /// Turns a row into its bytes, and back. `row` has `hidden` elements.
  using Quantize = void (*)(std::span<const float> row, std::span<std::uint8_t> elements,
                            std::span<std::uint8_t> scales);
  using Dequantize = void (*)(std::span<const std::uint8_t> elements,
                              std::span<const std::uint8_t> scales, std::span<float> row);

  std::string_view name;
  /// Dtypes as PyTorch names them, of elements and of the scales of groups. Those that DType lacks
  /// are uint8 in C++. Elements of "plain" are of the token_dtype.
  std::string_view element_name = "uint8";
  std::string_view scale_name = "uint8";
  std::int64_t elements_per_item = 1;  ///< elements that one item of that dtype holds
  std::int64_t group = 0;              ///< adjacent elements that share a scale; 0: no scales
  /// A float32 for the whole row, too: in the last four bytes of its scales, which are padded with
  /// zeros to a multiple of 16 bytes.
  bool has_row_scale = false;
  Quantize quantize = nullptr;
  Dequantize dequantize = nullptr;
};

/// All formats. The first is "plain"; the last is "bytes", whose sizes the payload has.
[[nodiscard]] std::span<const PayloadFormat> payload_formats();

/// The format with this name.
/// @throws InvalidArgument that begins with `argument` and lists the names
[[nodiscard]] const PayloadFormat& payload_format(std::string_view name, const char* argument);

/// In what form tokens travel: a format, and who quantises. Sizes are those of one row of `hidden`
/// elements.
class EPPayload {
 public:
  static const EPPayload plain;      ///< token_dtype
  static const EPPayload quantized;  ///< "float8", from token_dtype
  static const EPPayload scaled;     ///< "scaled_float8"

  constexpr EPPayload() = default;
  /// @param given rows come with their scales; else they come in token_dtype
  constexpr EPPayload(const PayloadFormat& format, bool given) : format_(&format), given_(given) {}

  /// "plain"; the name of a format, for rows that are quantised on their way; the name after
  /// "scaled_", for rows that are given with their scales; "bytes(ROW, SCALES)", for rows that
  /// nobody looks at, of so many bytes each. "quantized" is "float8", "scaled" "scaled_float8".
  /// @throws InvalidArgument that begins with `argument`
  [[nodiscard]] static EPPayload from_name(std::string_view name, const char* argument);
  [[nodiscard]] std::string name() const;

  [[nodiscard]] const PayloadFormat& format() const;
  [[nodiscard]] bool is_plain() const { return format_ == nullptr; }
  [[nodiscard]] bool is_given() const { return given_; }
  [[nodiscard]] bool is_quantized() const { return !is_plain() && !given_; }
  [[nodiscard]] bool is_bytes() const { return row_bytes_ > 0; }

  /// Shape and bytes of a row, and of its scales. Scales are [num_scales] of scale_dtype, where a
  /// format has a scale for the row also [scale_bytes] of uint8.
  [[nodiscard]] DType row_dtype(DType token_dtype) const;
  [[nodiscard]] std::int64_t row_items(std::int64_t hidden) const;
  [[nodiscard]] std::int64_t row_bytes(DType token_dtype, std::int64_t hidden) const;
  [[nodiscard]] DType scale_dtype() const;
  [[nodiscard]] std::int64_t num_groups(std::int64_t hidden) const;
  [[nodiscard]] std::int64_t scale_items(std::int64_t hidden) const;
  [[nodiscard]] std::int64_t scale_bytes(std::int64_t hidden) const;

  /// @throws InvalidArgument unless rows of `hidden` elements of `token_dtype` can be such
  void check(DType token_dtype, std::int64_t hidden, const char* who) const;

  /// Experts that got rows as "bytes" have nothing that is known to be a sum of theirs.
  /// @throws InvalidArgument
  void check_combine(const char* who) const;

  friend bool operator==(const EPPayload&, const EPPayload&) = default;

 private:
  const PayloadFormat* format_ = nullptr;  ///< null: plain
  bool given_ = false;
  std::int64_t row_bytes_ = 0;    ///< only "bytes" has them
  std::int64_t scale_bytes_ = 0;  ///< as row_bytes_
};

/// Quantises one row to a format, which says how.
/// @param row `hidden` elements of float32, float16 or bfloat16
/// @param elements, scales all bytes of the row, and of its scales
/// @throws InvalidArgument for a format without a quantiser, another dtype, and spans of other
/// sizes
void quantize_row(const PayloadFormat& format, const void* row, DType dtype,
                  std::span<std::uint8_t> elements, std::span<std::uint8_t> scales);

/// The inverse: element times scale in float32, rounded to `dtype`.
void dequantize_row(const PayloadFormat& format, std::span<const std::uint8_t> elements,
                    std::span<const std::uint8_t> scales, void* row, DType dtype);

}  // namespace waybill
