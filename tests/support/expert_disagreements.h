#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "waybill/experts/ep_all2all_layer.h"

// Calls of a layer of experts in which one rank does not mean what the others do.

namespace waybill::test {

inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
  }
}

/// What a rank did throws `Expected` within so many seconds; its text has all parts.
template <class Expected, class Calls>
void expect_throws(const Calls& calls, double within_s, const std::vector<std::string>& parts) {
  const auto start = std::chrono::steady_clock::now();
  try {
    calls();
    ADD_FAILURE() << "expected an error, but nothing was thrown";
  } catch (const Expected& error) {
    expect_parts(error.what(), parts);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected another error, got: " << error.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), within_s);
}

/// Calls that one rank makes otherwise, after two dispatches of all.
template <class Step>
struct CallCase {
  const char* name;
  std::function<void(Step&, const EPLayout& first, const EPLayout& second, bool odd)> calls;
  std::vector<std::string> named;
};

inline std::vector<std::string> belongs_to(int a, int b) {
  return {concat("to dispatch ", a, " on rank "), concat("to dispatch ", b, " on rank ")};
}

/// Something is given on one rank only, or on all but one.
template <class Step>
std::vector<CallCase<Step>> given_cases() {
  return {
      {"weights on some ranks only",
       [](Step& step, const EPLayout&, const EPLayout&, bool odd) {
         auto input = step.input();
         if (odd) input.weights = {};
         (void)step.dispatch(input);
       },
       {"dispatch: ranks disagree in call 3", ": weights = ", "true on rank ", "false on rank "}},
      {"full_scatter_indices on some ranks only",
       [](Step& step, const EPLayout&, const EPLayout&, bool odd) {
         auto input = step.input();
         if (odd) input.full_scatter_indices = step.positions();
         (void)step.dispatch(input);
       },
       {": full_scatter_indices = ", "true on rank "}},
      {"weighted on some ranks only",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         step.combine(first, odd);
       },
       {"combine: ranks disagree in call 3", ": weighted = ", "true on rank "}},
      {"gradients of a combine on some ranks only",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         step.combine(first, false, !odd);
       },
       {": needs_gradients = ", "true on rank "}},
      {"gradients of tokens on some ranks only",
       [](Step& step, const EPLayout&, const EPLayout&, bool odd) {
         auto input = step.input();
         input.needs_gradients = odd;
         (void)step.dispatch(input);
       },
       {": needs_gradients = ", "true on rank "}},
      {"gradients of weights on some ranks only",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         auto input = step.input();
         input.weights_need_gradients = odd;
         (void)step.dispatch(input, first);
       },
       {": weights_need_gradients = ", "true on rank "}},
  };
}

/// Calls that belong to different dispatches.
template <class Step>
std::vector<CallCase<Step>> belonging_cases() {
  return {
      {"the routing of another dispatch",
       [](Step& step, const EPLayout& first, const EPLayout& second, bool odd) {
         (void)step.dispatch(step.input(), odd ? second : first);
       },
       belongs_to(1, 2)},
      {"the order of two dispatches by layouts, as in two backward passes",
       [](Step& step, const EPLayout& first, const EPLayout& second, bool odd) {
         for (const bool turn : {odd, !odd}) {
           (void)step.dispatch(step.input(), turn ? first : second);
         }
       },
       belongs_to(1, 2)},
      {"the order of two combines",
       [](Step& step, const EPLayout& first, const EPLayout& second, bool odd) {
         for (const bool turn : {odd, !odd}) step.combine(turn ? first : second);
       },
       belongs_to(1, 2)},
      {"combine with the layout of a later dispatch by the same routing",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         const auto again = step.dispatch(step.input(), first).layout;
         step.combine(odd ? *again : first);
       },
       belongs_to(1, 3)},
      {"dispatches that work for others",
       [](Step& step, const EPLayout&, const EPLayout&, bool odd) {
         auto input = step.input();
         input.origin = odd ? 1 : 2;
         (void)step.dispatch(input);
       },
       belongs_to(1, 2)},
  };
}

/// Other operations.
template <class Step>
std::vector<CallCase<Step>> operation_cases() {
  return {
      {"the routing is known on some ranks only",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         (void)(odd ? step.dispatch(step.input(), first) : step.dispatch(step.input()));
       },
       {" calls dispatch", "dispatch with the layout of an earlier one"}},
      {"dispatch against combine",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         if (odd) {
           (void)step.dispatch(step.input());
         } else {
           step.combine(first);
         }
       },
       {" calls ", " dispatch", " combine", "; expected the same on all ranks"}},
      {"dispatch by a layout against combine",
       [](Step& step, const EPLayout& first, const EPLayout&, bool odd) {
         if (odd) {
           step.combine(first);
         } else {
           (void)step.dispatch(step.input(), first);
         }
       },
       {"dispatch with the layout of an earlier one", "combine"}},
  };
}

/// @tparam Step has input(), positions(), dispatch(input), dispatch(input, layout) and
/// combine(layout, weighted, needs_gradients)
template <class Step>
std::vector<CallCase<Step>> call_cases() {
  auto cases = given_cases<Step>();
  for (const auto& more : {belonging_cases<Step>(), operation_cases<Step>()}) {
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

}  // namespace waybill::test
