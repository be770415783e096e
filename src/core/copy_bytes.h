#pragma once

#include <cstddef>
#include <cstdint>

namespace waybill::detail {

/// Jobs that write more than this do not find what they wrote in the cache afterwards anyway, so
/// their stores go around it: that saves reading every line before it is overwritten.
inline constexpr std::int64_t streaming_bytes = std::int64_t{64} << 20;

/// memcpy. With `streaming` longer runs are stored around the cache: call finish_streaming() before
/// another thread may look.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t count, bool streaming);

/// Orders this thread's copies before all that it does next.
void finish_streaming();

}  // namespace waybill::detail
