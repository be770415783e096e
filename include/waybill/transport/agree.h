#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "waybill/core/wait.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {

/// Collective: every rank says what went wrong on it; empty: nothing.
/// @throws PeerFailed on all ranks when there is trouble, naming the first rank that has some;
///   Timeout
void agree(Bootstrap& bootstrap, std::string_view trouble, std::string_view operation);

/// Collective: does this rank's part of something that succeeds on all ranks or fails on all.
/// @throws what `work` threw, on the ranks where it did; on the others as agree. Where the user
///   interrupted it, it does not wait for the others, who are told.
template <class Work>
void run_collectively(Bootstrap& bootstrap, std::string_view operation, Work&& work) {
  std::exception_ptr error;
  std::string trouble;
  try {
    work();
  } catch (const Interrupted& interrupted) {  // who stops the program does not wait for the others
    bootstrap.fail(interrupted.what());
    throw;
  } catch (const std::exception& caught) {
    error = std::current_exception();
    trouble = caught.what();
    if (trouble.empty()) trouble = "an error without a text";
  }
  try {
    agree(bootstrap, trouble, operation);
  } catch (const Error&) {
    if (!error) throw;
  }
  if (error) std::rethrow_exception(error);
}

/// Not collective: makes something that needs the other ranks. Where that throws they are told, so
/// that they do not wait for this rank. @throws what `make` throws
template <class Make>
[[nodiscard]] auto fail_on_error(Bootstrap& bootstrap, Make&& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    bootstrap.fail(error.what());
    throw;
  }
}

/// The same text for all processes that run under one operating system, until it starts again;
/// another one on other hosts.
[[nodiscard]] std::string host_id();

/// Collective: whether all ranks run under one operating system.
[[nodiscard]] bool on_one_host(Bootstrap& bootstrap);

/// The same as a demand. @throws Unsupported on all ranks, naming one that is elsewhere; Timeout
void require_one_host(Bootstrap& bootstrap, std::string_view who);

}  // namespace waybill
