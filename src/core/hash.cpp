#include "core/hash.h"

#include <bit>

namespace waybill {

Hash& Hash::add(std::uint64_t value) {
  std::uint64_t x = value + 0x9E37'79B9'7F4A'7C15;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EB;
  x ^= x >> 31;
  value_ = (std::rotl(value_, 5) ^ x) * 0x0000'0100'0000'01B3;
  return *this;
}

Hash& Hash::add(double value) { return add(std::bit_cast<std::uint64_t>(value)); }

Hash& Hash::add(std::span<const std::int64_t> values) {
  add(static_cast<std::uint64_t>(values.size()));
  for (const std::int64_t value : values) add(value);
  return *this;
}

Hash& Hash::add(std::span<const std::int32_t> values) {
  add(static_cast<std::uint64_t>(values.size()));
  for (const std::int32_t value : values) add(value);
  return *this;
}

}  // namespace waybill
