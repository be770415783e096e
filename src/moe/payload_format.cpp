#include "waybill/moe/payload_format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "core/number.h"
#include "core/to_size.h"
#include "moe/payloads/quantizers.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

/// A format is an entry here, and a file of src/moe/payloads where it has a quantiser.
constinit const std::array formats{
    PayloadFormat{.name = "plain"},
    PayloadFormat{.name = "float8",
                  .element_name = "float8_e4m3fn",
                  .scale_name = "float32",
                  .group = 128,
                  .quantize = detail::quantize_float8,
                  .dequantize = detail::dequantize_float8},
    PayloadFormat{.name = "float8_ue8m0",
                  .element_name = "float8_e4m3fn",
                  .scale_name = "float8_e8m0fnu",
                  .group = 128,
                  .quantize = detail::quantize_float8_ue8m0,
                  .dequantize = detail::dequantize_float8_ue8m0},
    PayloadFormat{.name = "mxfp8",
                  .element_name = "float8_e4m3fn",
                  .scale_name = "float8_e8m0fnu",
                  .group = 32,
                  .quantize = detail::quantize_mxfp8,
                  .dequantize = detail::dequantize_mxfp8},
    PayloadFormat{.name = "mxfp8_e5m2",
                  .element_name = "float8_e5m2",
                  .scale_name = "float8_e8m0fnu",
                  .group = 32,
                  .quantize = detail::quantize_mxfp8_e5m2,
                  .dequantize = detail::dequantize_mxfp8_e5m2},
    PayloadFormat{.name = "nvfp4",
                  .element_name = "float4_e2m1fn_x2",
                  .scale_name = "float8_e4m3fn",
                  .elements_per_item = 2,
                  .group = 16,
                  .has_row_scale = true,
                  .quantize = detail::quantize_nvfp4,
                  .dequantize = detail::dequantize_nvfp4},
    PayloadFormat{.name = "bytes"},
};

constexpr std::string_view given_prefix = "scaled_";
constexpr std::int64_t row_scale_bytes = 4;
constexpr std::int64_t padded_scales = 16;  // bytes
constexpr std::int64_t max_row_bytes = std::numeric_limits<std::int32_t>::max();

/// The dtype of a name of PyTorch's; uint8 for those of one byte that the library lacks.
DType dtype_or_bytes(std::string_view name) {
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2, DType::float32}) {
    if (dtype_name(dtype) == name) return dtype;
  }
  return DType::uint8;
}

std::string known_names() {
  std::string known = "\"plain\", ";
  for (const PayloadFormat& format : formats) {
    if (format.quantize == nullptr) continue;
    known += concat("\"", format.name, "\", \"", given_prefix, format.name, "\", ");
  }
  return known + "\"quantized\", \"scaled\" or \"bytes(ROW, SCALES)\"";
}

/// The numbers of "bytes(7168, 224)".
std::optional<std::array<std::int64_t, 2>> numbers_of_bytes(std::string_view name) {
  constexpr std::string_view head = "bytes(";
  if (!name.starts_with(head) || !name.ends_with(")")) return std::nullopt;
  const char* at = name.data() + head.size();
  const char* const end = name.data() + name.size() - 1;
  std::array<std::int64_t, 2> numbers{};
  for (std::int64_t& number : numbers) {
    while (at < end && *at == ' ') ++at;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc{}) return std::nullopt;
    at = next;
    if (&number == &numbers[0] && (at == end || *at++ != ',')) return std::nullopt;
  }
  return at == end ? std::optional(numbers) : std::nullopt;
}

/// Checks what quantize_row and dequantize_row have in common. @return elements of the row
std::int64_t hidden_of(const char* who, const PayloadFormat& format, DType dtype,
                       std::size_t elements, std::size_t scales) {
  require(format.quantize != nullptr, who, ": format = \"", format.name,
          "\", expected one that has a quantiser");
  require(detail::is_summed(dtype) && dtype != DType::float64, who, ": dtype = ", dtype,
          ", expected float32, float16 or bfloat16");
  const std::int64_t hidden = static_cast<std::int64_t>(elements) * format.elements_per_item;
  const EPPayload payload(format, true);
  payload.check(dtype, hidden, who);
  require(static_cast<std::int64_t>(scales) == payload.scale_bytes(hidden), who, ": ", elements,
          " bytes of elements with ", scales, " bytes of scales, expected ",
          payload.scale_bytes(hidden));
  return hidden;
}

}  // namespace

std::span<const PayloadFormat> payload_formats() { return formats; }

const PayloadFormat& payload_format(std::string_view name, const char* argument) {
  const auto found = std::ranges::find(formats, name, &PayloadFormat::name);
  require(found != formats.end(), argument, " = \"", name, "\", expected ", known_names());
  return *found;
}

constinit const EPPayload EPPayload::plain{};
constinit const EPPayload EPPayload::quantized{formats[1], false};
constinit const EPPayload EPPayload::scaled{formats[1], true};

EPPayload EPPayload::from_name(std::string_view name, const char* argument) {
  if (name == "plain") return plain;
  if (name == "quantized") return quantized;
  if (name == "scaled") return scaled;
  if (const auto numbers = numbers_of_bytes(name)) {
    const auto& [row, scales] = *numbers;
    require(1 <= row && row <= max_row_bytes && 0 <= scales && scales <= max_row_bytes, argument,
            " = \"", name, "\", expected 1..", max_row_bytes, " bytes of a row, and 0..",
            max_row_bytes, " of its scales");
    EPPayload made(formats.back(), true);
    made.row_bytes_ = row;
    made.scale_bytes_ = scales;
    return made;
  }
  const bool given = name.starts_with(given_prefix);
  const auto found = std::ranges::find(formats, given ? name.substr(given_prefix.size()) : name,
                                       &PayloadFormat::name);
  require(found != formats.end() && found->quantize != nullptr, argument, " = \"", name,
          "\", expected ", known_names());
  return {*found, given};
}

std::string EPPayload::name() const {
  if (is_bytes()) return concat("bytes(", row_bytes_, ", ", scale_bytes_, ")");
  return concat(given_ ? given_prefix : "", format().name);
}

const PayloadFormat& EPPayload::format() const { return is_plain() ? formats.front() : *format_; }

DType EPPayload::row_dtype(DType token_dtype) const {
  return is_plain() ? token_dtype : dtype_or_bytes(format().element_name);
}

std::int64_t EPPayload::row_items(std::int64_t hidden) const {
  return is_bytes() ? row_bytes_ : hidden / format().elements_per_item;
}

std::int64_t EPPayload::row_bytes(DType token_dtype, std::int64_t hidden) const {
  return row_items(hidden) * dtype_bytes(row_dtype(token_dtype));
}

DType EPPayload::scale_dtype() const {
  return format().has_row_scale ? DType::uint8 : dtype_or_bytes(format().scale_name);
}

std::int64_t EPPayload::num_groups(std::int64_t hidden) const {
  return format().group == 0 ? 0 : hidden / format().group;
}

std::int64_t EPPayload::scale_items(std::int64_t hidden) const {
  return scale_bytes(hidden) / dtype_bytes(scale_dtype());
}

std::int64_t EPPayload::scale_bytes(std::int64_t hidden) const {
  const PayloadFormat& of = format();
  if (of.group == 0) return scale_bytes_;
  const std::int64_t bytes = num_groups(hidden) * dtype_bytes(dtype_or_bytes(of.scale_name));
  if (!of.has_row_scale) return bytes;
  return (bytes + row_scale_bytes + padded_scales - 1) / padded_scales * padded_scales;
}

void EPPayload::check(DType token_dtype, std::int64_t hidden, const char* who) const {
  const PayloadFormat& of = format();
  require(of.group == 0 || hidden % of.group == 0, who, ": hidden = ", hidden,
          ", expected a multiple of ", of.group, " for payload = \"", name(), "\"");
  require(!is_quantized() || token_dtype != DType::float64, who,
          ": token_dtype = float64, expected bfloat16, float16 or float32 for payload = \"", name(),
          "\", which is quantised on the way");
}

void EPPayload::check_combine(const char* who) const {
  require(!is_bytes(), who, ": payload = \"", name(),
          "\" has no combine, expected a format that says what its elements are");
}

void quantize_row(const PayloadFormat& format, const void* row, DType dtype,
                  std::span<std::uint8_t> elements, std::span<std::uint8_t> scales) {
  const std::int64_t hidden =
      hidden_of("quantize_row", format, dtype, elements.size(), scales.size());
  std::vector<float> values(detail::to_size(hidden));
  detail::for_number(dtype, [&]<class Number>(Number) {
    const auto* const from = static_cast<const typename Number::Stored*>(row);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(Number::load(from[i]));
    }
  });
  format.quantize(values, elements, scales);
}

void dequantize_row(const PayloadFormat& format, std::span<const std::uint8_t> elements,
                    std::span<const std::uint8_t> scales, void* row, DType dtype) {
  const std::int64_t hidden =
      hidden_of("dequantize_row", format, dtype, elements.size(), scales.size());
  std::vector<float> values(detail::to_size(hidden));
  format.dequantize(elements, scales, values);
  detail::for_number(dtype, [&]<class Number>(Number) {
    auto* const to = static_cast<typename Number::Stored*>(row);
    for (std::size_t i = 0; i < values.size(); ++i) to[i] = Number::round(values[i]);
  });
}

}  // namespace waybill
