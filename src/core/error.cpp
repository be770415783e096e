#include "waybill/core/error.h"

#include <iomanip>
#include <sstream>
#include <utility>

#include "core/printable.h"

namespace waybill {
namespace {

std::string describe(const TimeoutInfo& missed) {
  std::ostringstream text;
  text << missed.operation << ": rank " << missed.rank << " waited " << std::fixed
       << std::setprecision(missed.seconds < 1 ? 3 : 1) << missed.seconds << " s for "
       << missed.what << " >= " << missed.wanted << " from rank " << missed.peer;
  if (missed.peer_node >= 0) {
    text << " (node " << missed.peer_node << ", local_rank " << missed.peer_local << ")";
  }
  text << "; last seen " << missed.seen;
  if (missed.in_call) {
    text << "; ranks may be in different calls, or rank " << missed.peer
         << " caught an error of this one";
  }
  return text.str();
}

}  // namespace

void detail::throw_parts(std::initializer_list<TextPart> parts) {
  throw InvalidArgument(detail::join_parts(parts));
}

Error::Error(const std::string& text) : std::runtime_error(printable(text)) {}

IoError::IoError(const std::string& text) : Error(printable_line(text)) {}

Timeout::Timeout(TimeoutInfo missed) : Error(describe(missed)), missed_(std::move(missed)) {}

}  // namespace waybill
