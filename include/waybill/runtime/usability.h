#pragma once

#include <string>
#include <utility>

#include "waybill/core/error.h"

namespace waybill::detail {

/// What an object of collective calls remembers of a failed one: the ranks do not agree on where
/// they are any more, so that it is of no use.
class Usability {
 public:
  /// @param what in the text, such as "dispatcher"
  explicit Usability(const char* what) : what_(what) {}

  /// @throws TransportError saying why, once it has ended
  void check(const char* who) const {
    if (why_.empty()) return;
    throw TransportError(concat(who, ": the ", what_, " is of no use any more: ", why_));
  }

  void end(std::string why) { why_ = std::move(why); }

  /// Makes a collective call, and ends with the text of a Timeout, Disagreement or TransportError
  /// that comes out. A Timeout then says that ranks may be in different calls.
  template <class Call>
  void guard(Call&& call) {
    try {
      std::forward<Call>(call)();
    } catch (const Timeout& error) {
      MissedWait missed = error.missed();
      missed.in_call = true;
      Timeout told(std::move(missed));
      end(told.what());
      throw told;
    } catch (const Disagreement& error) {
      end(error.what());
      throw;
    } catch (const TransportError& error) {
      end(error.what());
      throw;
    }
  }

 private:
  const char* what_;
  std::string why_;
};

}  // namespace waybill::detail
