#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "waybill/core/error.h"

namespace waybill::test {

/// Success when `call` throws InvalidArgument with a text that holds every part.
template <class Call>
::testing::AssertionResult rejects(const Call& call,
                                   std::initializer_list<std::string_view> parts) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    for (const std::string_view part : parts) {
      if (text.find(part) == std::string::npos) {
        return ::testing::AssertionFailure()
               << "the error \"" << text << "\" does not name \"" << part << "\"";
      }
    }
    return ::testing::AssertionSuccess();
  } catch (const std::exception& error) {
    return ::testing::AssertionFailure() << "expected InvalidArgument, got: " << error.what();
  }
  return ::testing::AssertionFailure() << "expected InvalidArgument, but nothing was thrown";
}

}  // namespace waybill::test
