#pragma once

#include <string_view>

#include "core/test_hooks.h"

namespace waybill::test {

/// Hooks of the product as WAYBILL_TEST has them, for what is made meanwhile in this process and in
/// those that it forks.
class WithHooks {
 public:
  explicit WithHooks(std::string_view text)
      : hooks_(detail::parse_test_hooks(text, detail::test_hooks())),
        before_(detail::replace_test_hooks(&hooks_)) {}
  WithHooks(const WithHooks&) = delete;
  WithHooks& operator=(const WithHooks&) = delete;
  ~WithHooks() { (void)detail::replace_test_hooks(before_); }

 private:
  detail::TestHooks hooks_;
  const detail::TestHooks* before_;
};

}  // namespace waybill::test
