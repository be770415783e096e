#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "transport/bootstrap/wire.h"
#include "transport/transport.h"
#include "waybill/core/error.h"

namespace waybill::detail {

/// The abort state of an object of collective calls: after a failed one the ranks do not agree on
/// where they are any more, and the object is unusable.
class AbortState {
 public:
  /// @param what in the text, such as "dispatcher"
  /// @param transport reports failures that other ranks cannot see; null: no report
  explicit AbortState(const char* what, Transport* transport = nullptr)
      : what_(what), transport_(transport), num_exceptions_(std::uncaught_exceptions()) {}
  AbortState(AbortState&& other) noexcept
      : what_(other.what_),
        transport_(std::exchange(other.transport_, nullptr)),
        process_(other.process_),
        why_(std::move(other.why_)),
        num_exceptions_(other.num_exceptions_) {}
  AbortState& operator=(AbortState&&) = delete;
  ~AbortState() {
    // The others know of a failure of the object itself, or find out by themselves.
    if (transport_ == nullptr || !why_.empty()) return;
    if (std::uncaught_exceptions() > num_exceptions_) transport_->note_unwinding();
  }

  /// @throws TransportError saying why, once it has ended
  void check(const char* who) const {
    process_.require_here(who, what_);
    if (why_.empty()) return;
    throw TransportError(concat(who, ": the ", what_, " ", why_));
  }

  /// @param why what it is or was: "was closed"
  void end(std::string why) { why_ = std::move(why); }

  /// Makes a collective call. What comes out ends the object, but for an argument that was refused
  /// before anything moved; a Timeout then says that ranks may be in different calls. Other ranks
  /// are told, unless they find out as this one did: by a deadline, or as their calls differ.
  template <class Call>
  void guard(Call&& call) {
    try {
      std::forward<Call>(call)();
    } catch (const Disagreement& error) {
      end_after("a failure", error.what());
      throw;
    } catch (const InvalidArgument&) {
      throw;
    } catch (const Unsupported&) {
      throw;
    } catch (const Timeout& error) {
      TimeoutInfo missed = error.missed();
      missed.in_call = true;
      end_after("a failure", Timeout(missed).what());
      throw Timeout(std::move(missed));
    } catch (const Interrupted& error) {
      end_all("an interrupt", error.what());
      throw;
    } catch (const std::bad_alloc&) {
      end_all("a failure", "out of memory");
      throw;
    } catch (const std::exception& error) {
      end_all("a failure", error.what());
      throw;
    } catch (...) {
      end_all("a failure", "an error without a text");
      throw;
    }
  }

 private:
  /// The first failure stays. Short texts need no memory, which may be exhausted.
  void end_after(const char* what, const char* why) noexcept {
    if (!why_.empty()) return;
    try {
      why_ = concat("is unusable after ", what, ": ", why);
    } catch (const std::exception&) {
      why_ = "is unusable";
    }
  }

  /// Ends the other ranks, too.
  void end_all(const char* what, const char* why) noexcept {
    end_after(what, why);
    if (transport_ != nullptr) transport_->fail(why);
  }

  const char* what_;
  Transport* transport_;
  OwnProcess process_;
  std::string why_;
  int num_exceptions_;  ///< that were in flight when the object was made
};

}  // namespace waybill::detail
