#include "waybill/core/dtype.h"

#include <array>
#include <ostream>
#include <string>

#include "core/number.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  std::int64_t bytes;
};

constexpr std::array<Entry, 14> entries{{
    {DType::boolean, "bool", 1},
    {DType::int8, "int8", 1},
    {DType::uint8, "uint8", 1},
    {DType::int16, "int16", 2},
    {DType::int32, "int32", 4},
    {DType::uint32, "uint32", 4},
    {DType::int64, "int64", 8},
    {DType::uint64, "uint64", 8},
    {DType::float8_e4m3fn, "float8_e4m3fn", 1},
    {DType::float8_e5m2, "float8_e5m2", 1},
    {DType::float16, "float16", 2},
    {DType::bfloat16, "bfloat16", 2},
    {DType::float32, "float32", 4},
    {DType::float64, "float64", 8},
}};

constexpr std::array<std::pair<std::string_view, DType>, 6> short_names{{
    {"fp8", DType::float8_e4m3fn},
    {"fp16", DType::float16},
    {"bf16", DType::bfloat16},
    {"fp32", DType::float32},
    {"fp64", DType::float64},
    {"bytes", DType::uint8},
}};

const Entry& entry_of(DType dtype) {
  const auto idx = static_cast<std::size_t>(dtype);
  require(idx < entries.size(), "dtype: value ", idx, ", expected 0..", entries.size() - 1);
  return entries[idx];
}

}  // namespace

std::int64_t dtype_bytes(DType dtype) { return entry_of(dtype).bytes; }

std::string_view dtype_name(DType dtype) { return entry_of(dtype).name; }

DType dtype_from_name(std::string_view name) {
  std::string known;
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry.dtype;
    known += concat(known.empty() ? "" : ", ", entry.name);
  }
  for (const auto& [short_name, dtype] : short_names) {
    if (short_name == name) return dtype;
    known += concat(", ", short_name);
  }
  throw_invalid("dtype_from_name: name = \"", name, "\", expected one of ", known);
}

std::vector<std::string_view> detail::dtype_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : entries) names.push_back(entry.name);
  return names;
}

std::vector<std::string_view> detail::short_dtype_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, dtype] : short_names) names.push_back(name);
  return names;
}

std::ostream& operator<<(std::ostream& out, DType dtype) {
  const auto idx = static_cast<std::size_t>(dtype);
  if (idx >= entries.size()) return out << "dtype " << idx;  // printing never throws
  return out << entries[idx].name;
}

}  // namespace waybill
