#pragma once

// What a test cannot do under a sanitizer. Such a test says why, and is skipped there.

#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define WAYBILL_TEST_SLOW  // several times slower, and threads take much more memory
#endif
#if __has_feature(thread_sanitizer)
#define WAYBILL_TEST_TSAN
#endif
#if __has_feature(undefined_behavior_sanitizer)
#define WAYBILL_TEST_UBSAN
#endif
#endif

namespace waybill::test {

#ifdef WAYBILL_TEST_SLOW
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace waybill::test
