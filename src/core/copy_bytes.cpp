#include "core/copy_bytes.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace waybill::detail {

#if defined(__SSE2__)
namespace {

constexpr std::size_t min_streaming_run = 1024;  // shorter runs fill too few write buffers

void stream_bytes(std::byte* to, const std::byte* from, std::size_t count) {
  const std::size_t head = (16 - reinterpret_cast<std::uintptr_t>(to) % 16) % 16;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  count -= head;
  for (; count >= 64; to += 64, from += 64, count -= 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to, from, count);
}

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, std::size_t count, bool streaming) {
  if (streaming && count >= min_streaming_run) {
    stream_bytes(to, from, count);
  } else if (count > 0) {
    std::memcpy(to, from, count);
  }
}

void finish_streaming() { _mm_sfence(); }
#else
void copy_bytes(std::byte* to, const std::byte* from, std::size_t count, bool /*streaming*/) {
  if (count > 0) std::memcpy(to, from, count);
}

void finish_streaming() {}
#endif

}  // namespace waybill::detail
